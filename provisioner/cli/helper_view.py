"""The helper's input and answer, and what would be sent to the server, for people: readable, and without secrets."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import attrs
import jwt
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from provisioner import lifetimes
from provisioner.host.answer import Answer
from provisioner.host.facts import Facts
from provisioner.text import MASK, masked, plain_line

#: Longest value that is shown.
VALUE_CHARACTERS = 200

_SECRET_NAME = re.compile(r"pass|secret", re.IGNORECASE)
_SECRET_OR_FILE_NAME = re.compile(r"token|credential|seed|key", re.IGNORECASE)
_FILE = re.compile(r"(~|\.{0,2}|[A-Za-z]:)[/\\]\S*")
# begins where a word does: else a megabyte of beginnings would take hours
_JWT = re.compile(r"(?<![\w-])eyJ[\w-]{8,}\.[\w-]+\.[\w-]*")
_URL_LOGIN = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_UNREADABLE = (ValueError, TypeError, UnsupportedAlgorithm, x509.InvalidVersion)


@attrs.frozen
class View:
    """Shows things without secrets.

    :ivar secrets: texts that must not be shown wherever they stand
    """

    secrets: Collection[str] = attrs.field(repr=False)

    def facts(self, facts: Facts) -> Iterator[str]:
        """What the helper is told."""
        data = _decoded(facts.inventory.text)
        told = data.get("facts") if isinstance(data, dict) else None
        yield _line("identity", self.text(facts.identity))
        yield _line(
            "inventory",
            f"version {self.text(facts.inventory.version) or '?'}, {len(told) if isinstance(told, dict) else 0} facts",
        )
        claims = ", ".join(sorted(map(self.text, facts.claims))) if facts.claims else ""
        yield _line("jwt", f"claims {claims}" if facts.claims else "null (feature jwt is off)")
        key = facts.signing_key
        yield _line("ed25519_pubkey", f"{self.text(key.public_key)} in {self.text(key.directory)}" if key else "null")
        yield _line("csr", f"for its ssldir {self.text(facts.ssldir)}" if facts.csr else "null")

    def answer(self, wanted: Answer) -> Iterator[str]:
        """What the helper says, as far as it says something."""
        if wanted.defer or wanted.shutdown:
            yield _line("defer" if wanted.defer else "shutdown", f"true: {self.text(wanted.msg)}")
            return
        if wanted.msg:
            yield _line("msg", self.text(wanted.msg))
        if wanted.upgrade:
            yield _line("upgrade", self.text(wanted.upgrade))
        for name in ("certificate", "ca"):
            if pem := getattr(wanted, name):
                yield _line(name, "; ".join(map(self.text, _certificates(pem))))
        if wanted.key:
            yield _line("key", f"{MASK} ({len(wanted.key)} characters)")
        if wanted.ssldir:
            yield _line("ssldir", self.text(wanted.ssldir))
        yield from self._claims(attrs.asdict(wanted.server_claims))
        yield from self._group("configuration", self._settings(wanted.configuration))
        for name in ("action_policies", "opa_policies"):
            policies: Mapping[str, str] = getattr(wanted, name)
            sizes = ((self.text(file), f"{len(text.splitlines())} lines") for file, text in sorted(policies.items()))
            yield from self._group(name, sizes)

    def verdict(self, wanted: Answer) -> str:
        """What the helper's answer comes down to."""
        if wanted.defer:
            return f"defer: {self.text(wanted.msg)}"
        if wanted.shutdown:
            return f"shut down: {self.text(wanted.msg)}"
        settings = f"{len(wanted.configuration)} settings"
        more = [name for name in ("certificate", "key", "action_policies", "opa_policies") if getattr(wanted, name)]
        upgrade = f"upgrade to {self.text(wanted.upgrade)}, " if wanted.upgrade else ""
        return f"{upgrade}configure with {', '.join((settings, *(name.replace('_', ' ') for name in more)))}"

    def sent(self, inputs: Mapping[str, Any]) -> Iterator[str]:
        """What `configure` would be sent."""
        settings = _decoded(inputs["config"])
        yield _line("config", f"{len(settings)} settings, {len(inputs['config'])} characters")
        for name in ("certificate", "ca"):
            if inputs[name]:
                yield _line(name, f"{len(inputs[name])} characters")
        if inputs["key"]:
            yield _line("key", "encrypted for this server")
        if inputs["ssldir"]:
            yield _line("ssldir", self.text(inputs["ssldir"]))
        for name in ("action_policies", "opa_policies"):
            if inputs[name]:
                yield _line(name, f"{len(inputs[name])} files")
        if inputs["server_jwt"]:
            claims = jwt.decode(inputs["server_jwt"], options={"verify_signature": False})
            collectives = ", ".join(claims["collectives"])
            about = f"of organization {claims['ou']}, for {collectives}, until {lifetimes.date(claims['exp'])}"
            yield _line("server_jwt", self.text(about))

    def text(self, text: str) -> str:
        """A text on one line, without the secrets that are known, and of a bearable length."""
        line = plain_line(_URL_LOGIN.sub(MASK, _JWT.sub(MASK, masked(text, self.secrets))))
        return line if len(line) <= VALUE_CHARACTERS else f"{line[:VALUE_CHARACTERS]}..."

    def setting(self, name: str, value: str) -> str:
        """A value of the server's configuration: masked where the name of the setting is that of a secret."""
        if _SECRET_NAME.search(name) or (_SECRET_OR_FILE_NAME.search(name) and not _FILE.fullmatch(value)):
            return MASK
        return self.text(value)

    def _settings(self, configuration: Mapping[str, str]) -> Iterator[tuple[str, str]]:
        return ((self.text(name), self.setting(name, value)) for name, value in sorted(configuration.items()))

    def _claims(self, claims: Mapping[str, Any]) -> Iterator[str]:
        said = {name: value for name, value in claims.items() if value not in ("", None, (), {})}
        if exp := said.get("exp"):
            said["exp"] = f"{exp} ({lifetimes.date(exp)})"
        yield from self._group("server_claims", ((name, self.text(_shown(value))) for name, value in said.items()))

    def _group(self, title: str, entries: Iterable[tuple[str, str]]) -> Iterator[str]:
        lines = list(entries)
        if not lines:
            return
        yield f"  {title}"
        width = max(len(name) for name, _ in lines)
        for name, value in lines:
            yield f"    {name:<{width}}  {value}"


def certificate_problems(wanted: Answer, facts: Facts) -> Iterator[str]:
    """What is wrong with a certificate that the server would find out too late. The daemon does not look at it."""
    if not wanted.certificate:
        return
    try:
        certificate = x509.load_pem_x509_certificates(wanted.certificate.encode())[0]
        public = certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        request = x509.load_pem_x509_csr(facts.csr.csr.encode()) if facts.csr else None
        x509.load_pem_x509_certificates(wanted.ca.encode())
    except _UNREADABLE:
        yield "certificate, ca: not both are certificates in PEM that can be read here"
        return
    if request and not wanted.key:
        wanted_public = request.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        if public != wanted_public:
            yield "certificate: it is not for the key of the request, so the server cannot use it"


def _certificates(pem: str) -> list[str]:
    try:
        found = x509.load_pem_x509_certificates(pem.encode())
        return [
            f"{each.subject.rfc4514_string()} until {lifetimes.date(each.not_valid_after_utc.timestamp())}"
            for each in found
        ]
    except _UNREADABLE:
        return ["no certificate in PEM that can be read here"]


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return {}


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}: {str(given).lower()}" for name, given in value.items())
    return ", ".join(value) if isinstance(value, tuple | list) else str(value)


def _line(name: str, value: str) -> str:
    return f"  {name:<15}  {value}"
