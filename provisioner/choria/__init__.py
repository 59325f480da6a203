"""Choria's network as one of its clients sees it; knows nothing of provisioning."""

import warnings

with warnings.catch_warnings():
    # pynats2 imports pkg_resources, which warns that its days are counted
    warnings.simplefilter("ignore")
    import pynats2  # noqa: F401 - by its first importer, so that it warns nobody
