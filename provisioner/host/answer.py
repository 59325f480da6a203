"""What the helper answered."""

from __future__ import annotations

import attrs

from provisioner import contract


@attrs.frozen(kw_only=True)
class ServerClaims:
    """What the helper wants in the server's own JWT; empty and None stand for what it did not say.

    :ivar exp: seconds since the epoch, before the year 10000, maybe long past
    :ivar permissions: those that it named of the four that Choria knows
    """

    ou: str = ""
    exp: int | None = None
    collectives: tuple[str, ...] = ()
    pub_subjects: tuple[str, ...] = ()
    permissions: dict[str, bool] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class Answer:
    """The helper's answer; empty stands for what it did not say.

    :ivar defer: leave the host to a later cycle, whatever else the answer says
    :ivar shutdown: shut the server down, do not configure it
    :ivar msg: the reason for either, as it came: any text of any length
    """

    defer: bool = False
    shutdown: bool = False
    msg: str = attrs.field(default="", repr=False)
    key: str = attrs.field(default="", repr=False)
    certificate: str = attrs.field(default="", repr=False)
    ca: str = attrs.field(default="", repr=False)
    ssldir: str = attrs.field(default="", repr=False)
    configuration: dict[str, str] = attrs.field(factory=dict, repr=False)
    action_policies: dict[str, str] = attrs.field(factory=dict, repr=False)
    opa_policies: dict[str, str] = attrs.field(factory=dict, repr=False)
    server_claims: ServerClaims = attrs.field(factory=ServerClaims, repr=False)
    upgrade: str = attrs.field(default="", repr=False)


def parse(stdout: bytes) -> Answer:
    """Read what the helper printed: one JSON document, an object. See :func:`provisioner.contract.read`.

    :raises provisioner.contract.AnswerError: anything else than such a document, or a value of the wrong type in it
    """
    members = contract.read(contract.document(stdout))
    return Answer(**members | {"server_claims": ServerClaims(**members["server_claims"])})
