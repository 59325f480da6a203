"""TLS contexts for the connection to a broker."""

from __future__ import annotations

import ssl


def system_trust_context() -> ssl.SSLContext:
    """For an insecure network whose broker insists on TLS: no certificate of our own, the system's trust store.

    The broker is verified all the same, its host name against the subject alternative names alone, as the Go original
    does. ``SSL_CERT_FILE`` and ``SSL_CERT_DIR`` replace the system's store.
    """
    # not create_default_context: what that is strict about differs between Python versions
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.hostname_checks_common_name = False
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.load_default_certs()
    return context
