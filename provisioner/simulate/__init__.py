"""Simulated parts of a Choria network: a broker and unprovisioned servers, for the demo and for tests."""
