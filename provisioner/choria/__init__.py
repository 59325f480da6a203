"""Choria's network as one of its clients sees it; knows nothing of provisioning."""
