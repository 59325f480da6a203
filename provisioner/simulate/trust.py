"""What makes a request, and a provisioned server, trustworthy on a secured network: the judgement of its brokers and
of its servers, which is what all provisioning is for and what no unprovisioned server shows.

Independent of the parts that make the tokens and signatures, so as not to share their mistakes.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping


class UntrustedError(Exception):
    """The text says what is wrong; it names no host, so that it can be counted."""


class Trust(typing.Protocol):
    """One kind of secured network."""

    def check_request(self, signed: bytes, *, signature: str, proof: str, caller: str) -> str:
        """As :class:`provisioner.simulate.envelopes.SignatureCheck` has it."""

    def check_server(self, settings: Mapping[str, str], files: Mapping[str, str], *, identity: str) -> None:
        """See whether a server can live on the network with what it was given.

        :param settings: its configuration
        :param files: by their full names
        :raises UntrustedError: when it cannot
        """


def setting(settings: Mapping[str, str], name: str, wanted: str) -> None:
    """Raise :class:`UntrustedError` unless a setting has the value it must have."""
    if settings.get(name) != wanted:
        raise UntrustedError(f"{name} is not {wanted}")


def file(settings: Mapping[str, str], files: Mapping[str, str], name: str) -> str:
    """Give the contents of the file that a setting names.

    :raises UntrustedError: when there is none
    """
    try:
        return files[settings[name]]
    except KeyError:
        raise UntrustedError(f"{name} names no file that is there") from None
