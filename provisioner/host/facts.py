"""What a server said in one cycle, and how the helper is told."""

from __future__ import annotations

import json
from typing import Any

import attrs

from provisioner.choria.identity import reason_insane
from provisioner.errors import ProvisionerError
from provisioner.host.node import CSR, Inventory, SigningKey, Token


class FactsError(ProvisionerError):
    """A document is not a helper's input; the text names the member at fault."""


@attrs.frozen(kw_only=True)
class Facts:
    """What the server said in this cycle; None for what it was not asked. Server keys change with every call, so
    nothing of it is used in another cycle.

    :ivar claims: of its provisioning JWT, verified
    :ivar csr: its request for a certificate, checked
    """

    identity: str
    token: Token | None
    claims: dict[str, Any] | None = attrs.field(repr=False)
    signing_key: SigningKey | None
    inventory: Inventory
    csr: CSR | None

    @property
    def provision_default(self) -> bool | None:
        """Whether it goes into provisioning mode on its own accord; None when that is not known."""
        return None if self.claims is None else self.claims.get("chpd") is True

    @property
    def ssldir(self) -> str:
        """The directory that it named with its request for a certificate; empty when it was not asked for one."""
        return self.csr.ssldir if self.csr else ""

    @property
    def secret(self) -> str:
        """The provisioning token in its JWT, which it believes callers by; empty when that is not known."""
        return str((self.claims or {}).get("cht") or "")

    def document(self) -> bytes:
        """The helper's standard input: one JSON document."""
        members = {
            "identity": self.identity,
            "csr": attrs.asdict(self.csr) if self.csr else None,
            "ed25519_pubkey": attrs.asdict(self.signing_key) if self.signing_key else None,
            "inventory": self.inventory.text,
            "jwt": self.claims,
        }
        return json.dumps(members).encode()


def parse(document: bytes) -> Facts:
    """What a helper's input says, which was made by :meth:`Facts.document`. Nothing in it is verified again.

    :raises FactsError: it is none
    """
    try:
        members = json.loads(document)
    except (ValueError, RecursionError):
        raise FactsError("not JSON") from None
    if not isinstance(members, dict):
        raise FactsError("no JSON object")
    claims = members.get("jwt")
    if claims is not None and not isinstance(claims, dict):
        raise FactsError("jwt: neither an object nor null")
    identity = _text(members, "identity")
    if reason := reason_insane(identity):
        raise FactsError(f"identity: {reason}")
    request, key = _texts(members, "csr", CSR), _texts(members, "ed25519_pubkey", SigningKey)
    return Facts(
        identity=identity,
        token=None,
        claims=claims,
        signing_key=SigningKey(**key) if key else None,
        inventory=_inventory(_text(members, "inventory")),
        csr=CSR(**request) if request else None,
    )


def _texts(members: dict[str, Any], name: str, kind: type[CSR | SigningKey]) -> dict[str, str] | None:
    value = members.get(name)
    if value is None:
        return None
    if not isinstance(value, dict):
        raise FactsError(f"{name}: neither an object nor null")
    return {field.name: _text(value, field.name, f"{name}.") for field in attrs.fields(kind)}


def _text(members: dict[str, Any], name: str, prefix: str = "") -> str:
    value = members.get(name)
    if not isinstance(value, str):
        raise FactsError(f"{prefix}{name}: a string is wanted")
    return value


def _inventory(text: str) -> Inventory:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        raise FactsError("inventory: not a string that holds JSON") from None
    version, upgradable = (data.get("version"), data.get("upgradable")) if isinstance(data, dict) else ("", False)
    return Inventory(text, version if isinstance(version, str) else "", upgradable is True)
