"""TLS contexts for the connection to a broker."""

from __future__ import annotations

import ssl
from collections.abc import Iterator

from provisioner.choria.credentials import CredentialsError, File
from provisioner.choria.settings import CIPHER_SUITES, ECC_CURVES, Settings

#: What OpenSSL calls the cipher suites of TLS 1.2, by the names that Go has for them.
TLS12_CIPHERS = {
    "TLS_RSA_WITH_AES_128_CBC_SHA": "AES128-SHA",
    "TLS_RSA_WITH_AES_256_CBC_SHA": "AES256-SHA",
    "TLS_RSA_WITH_AES_128_CBC_SHA256": "AES128-SHA256",
    "TLS_RSA_WITH_AES_128_GCM_SHA256": "AES128-GCM-SHA256",
    "TLS_RSA_WITH_AES_256_GCM_SHA384": "AES256-GCM-SHA384",
    "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA": "ECDHE-ECDSA-AES128-SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA": "ECDHE-ECDSA-AES256-SHA",
    "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA": "ECDHE-RSA-AES128-SHA",
    "TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA": "ECDHE-RSA-AES256-SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA256": "ECDHE-ECDSA-AES128-SHA256",
    "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA256": "ECDHE-RSA-AES128-SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256": "ECDHE-ECDSA-AES128-GCM-SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384": "ECDHE-ECDSA-AES256-GCM-SHA384",
    "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256": "ECDHE-RSA-AES128-GCM-SHA256",
    "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384": "ECDHE-RSA-AES256-GCM-SHA384",
    "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-ECDSA-CHACHA20-POLY1305",
    "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-RSA-CHACHA20-POLY1305",
}
#: Those of TLS 1.3, which are on offer whatever is configured, in Go as here.
TLS13_CIPHERS = frozenset({"TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256"})
#: What OpenSSL calls the curves, by the names that Go has for them.
CURVES = {"X25519": "X25519", "CurveP256": "prime256v1", "CurveP384": "secp384r1", "CurveP521": "secp521r1"}


def system_trust_context() -> ssl.SSLContext:
    """For an insecure network whose broker insists on TLS: no certificate of our own, the system's trust store.

    The broker is verified all the same, its host name against the subject alternative names alone, as the Go original
    does. ``SSL_CERT_FILE`` and ``SSL_CERT_DIR`` replace the system's store.
    """
    context = _context()
    context.load_default_certs()
    return context


def network_context(settings: Settings, *, ca: File | None, pair: tuple[File, File] | None) -> ssl.SSLContext:
    """For a secured network; reads all files anew.

    :param ca: the only authorities that are trusted; None: the broker is not verified
    :param pair: the files of our certificate and its key, if we have any
    :raises CredentialsError: when a file cannot be used for TLS
    """
    context = _context()
    context.hostname_checks_common_name = settings.support_legacy_certificates
    _limit(context, settings)
    if ca is None:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    else:
        # like Go: what is in the file is trusted for itself, be it an authority below another
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        _trust(context, ca)
    if pair is not None:
        _present(context, *pair)
    return context


def limit_problems(settings: Settings) -> Iterator[str]:
    """What is wrong with the cipher suites and curves that the settings limit TLS to."""
    for name in _named(settings.cipher_suites):
        if name not in TLS13_CIPHERS and name not in TLS12_CIPHERS:
            yield f"{CIPHER_SUITES}: given {name[:80]!r}, wanted a name like TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256"
    for name in _named(settings.ecc_curves):
        if name not in CURVES:
            yield f"{ECC_CURVES}: given {name[:80]!r}, wanted {', '.join(CURVES)}"


def limit_warnings(settings: Settings) -> Iterator[str]:
    """What the settings want and Python's TLS cannot do."""
    if len(_named(settings.ecc_curves)) > 1:
        yield f"{ECC_CURVES}: ignored, since only a single curve can be chosen here, or else all of them"


def _context() -> ssl.SSLContext:
    # not create_default_context: what that is strict about differs between Python versions
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.hostname_checks_common_name = False
    context.options |= ssl.OP_NO_RENEGOTIATION
    return context


def _limit(context: ssl.SSLContext, settings: Settings) -> None:
    suites, curves = _named(settings.cipher_suites), _named(settings.ecc_curves)
    older = [TLS12_CIPHERS[name] for name in suites if name in TLS12_CIPHERS]
    if older:
        try:
            context.set_ciphers(":".join(older))
        except ssl.SSLError:
            raise CredentialsError([f"{CIPHER_SUITES}: this system's OpenSSL has none of them"]) from None
    elif suites:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
    if len(curves) == 1 and curves[0] in CURVES:
        try:
            context.set_ecdh_curve(CURVES[curves[0]])
        except (ssl.SSLError, ValueError):  # Python 3.11.2 does not know X25519
            raise CredentialsError([f"{ECC_CURVES}: this system's Python cannot choose {curves[0]}"]) from None


def _named(names: tuple[str, ...]) -> list[str]:
    return [name for name in names if name]


def _trust(context: ssl.SSLContext, ca: File) -> None:
    try:
        context.load_verify_locations(cadata=ca.read().decode("ascii", "ignore"))
    except (ssl.SSLError, ValueError):
        raise ca.error("holds no certificate in PEM that can be read") from None


def _present(context: ssl.SSLContext, certificate: File, key: File) -> None:
    certificate.read()  # tells which of the two it is that cannot be read
    key.read()
    try:
        # without a passphrase of ours OpenSSL would ask for one at the terminal
        context.load_cert_chain(certificate.path, key.path, password="")
    except ssl.SSLError as error:
        reason = (error.reason or "it cannot be read").lower().replace("_", " ")
        raise certificate.error(f"not to be used for TLS with {key}: {reason}") from None
    except OSError as error:
        raise certificate.error(error.strerror or type(error).__name__) from None
