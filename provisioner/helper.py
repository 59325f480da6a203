"""For authors of helpers in Python: what is known of a server, with types, and an answer that the daemon will take.

    #!/usr/lib/choria-provisioner/bin/python3 -I
    from provisioner.helper import Answer, Server, configure, defer, run

    def decide(server: Server) -> Answer:
        if "role" not in server.facts:
            defer("it has no role yet")
        return configure({"plugin.choria.server.provision": "false", "loglevel": "info"})

    if __name__ == "__main__":
        run(decide)

The answer is checked by the daemon's own rules before it is printed, so that a mistake is found by the first try with
a saved input. Whatever goes wrong is one line on standard error, and exit code 1.

A helper is started for every server, and its start takes longer than all the rest. So this imports nothing that `json`
does not import anyway, neither `attrs` nor `typing`, and its classes are plain ones.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from types import TracebackType

from provisioner import contract
from provisioner.contract import AnswerError
from provisioner.errors import ProvisionerError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

    #: What a helper prints, as Python's own types.
    Answer = dict[str, Any]
else:
    Answer = dict

__all__ = [
    "CSR",
    "Answer",
    "AnswerError",
    "HelperError",
    "Server",
    "SigningKey",
    "configure",
    "defer",
    "fail",
    "read_text",
    "run",
    "shutdown",
    "try_out",
]

#: How much of an error is told; the daemon's log has no more of it.
TOLD_CHARACTERS = 500

_STDOUT, _STDERR = 1, 2
_NOTHING = contract.read({})
#: What may be named in an answer, and in those of its members that are objects with names of ours.
_MEMBERS = {"": (*_NOTHING,), "server_claims": (*_NOTHING["server_claims"],), "permissions": contract.PERMISSIONS}


class HelperError(ProvisionerError):
    """The helper cannot say what is to become of the server; the text is the one line that is told."""


class CSR:
    """A server's request for a certificate, which the daemon has checked.

    :ivar csr: the request, PEM
    :ivar public_key: as the server names it, which is often wrong: take the one in the request
    :ivar ssldir: the directory in which the server keeps its key, and will keep `certificate.pem` and `ca.pem`
    """

    __slots__ = ("csr", "public_key", "ssldir")

    def __init__(self, *, csr: str, public_key: str, ssldir: str) -> None:
        self.csr = csr
        self.public_key = public_key
        self.ssldir = ssldir


class SigningKey:
    """The key that a server of an organization has made for itself.

    :ivar public_key: 64 hexadecimal digits
    :ivar directory: in which the server keeps `server.seed`, and will keep `server.jwt`
    :ivar signature: of a nonce of the daemon, which has verified it
    """

    __slots__ = ("directory", "public_key", "signature")

    def __init__(self, *, public_key: str, directory: str, signature: str) -> None:
        self.public_key = public_key
        self.directory = directory
        self.signature = signature


class Server:
    """What is known of the server that waits.

    :ivar identity: may hold anything but white space, control characters, `*` and `>`: compare it with what you know
        before it becomes a part of a path, a command or a URL
    :ivar inventory: what the server says of itself
    :ivar document: the whole input
    """

    __slots__ = ("document", "identity", "inventory")

    def __init__(self, document: Mapping[str, Any]) -> None:
        """Take the input apart.

        :raises HelperError: it is not what the daemon sends
        """
        self.document = document
        self.identity = _text(document, "identity")
        self.inventory = _inventory(document.get("inventory", {}))

    @property
    def facts(self) -> dict[str, Any]:
        """The facts in its inventory: what the server says of itself, of any type; none when it has none."""
        facts = self.inventory.get("facts")
        return facts if isinstance(facts, dict) else {}

    @property
    def version(self) -> str:
        """Of Choria on the server; empty when it does not tell."""
        version = self.inventory.get("version")
        return version if isinstance(version, str) else ""

    @property
    def jwt(self) -> dict[str, Any]:
        """The claims of its provisioning token, which the daemon has verified.

        :raises HelperError: the feature `jwt` is off
        """
        return self._part("jwt", feature="jwt")

    @property
    def csr(self) -> CSR:
        """Its request for a certificate.

        :raises HelperError: the feature `pki` is off
        """
        part = self._part("csr", feature="pki")
        return CSR(**{name: _text(part, name, "csr.") for name in CSR.__slots__})

    @property
    def ed25519_pubkey(self) -> SigningKey:
        """Its key.

        :raises HelperError: the feature `ed25519` is off
        """
        part = self._part("ed25519_pubkey", feature="ed25519")
        return SigningKey(**{name: _text(part, name, "ed25519_pubkey.") for name in SigningKey.__slots__})

    def _part(self, name: str, *, feature: str) -> dict[str, Any]:
        part = self.document.get(name)
        if part is None:
            raise HelperError(f"the input has no {name}: it comes with features: {feature}: true in provisioner.yaml")
        if not isinstance(part, dict):
            raise HelperError(f"the input is none of the daemon's: {name}: an object is wanted")
        return part


def configure(
    configuration: Mapping[str, str],
    *,
    certificate: str = "",
    ca: str = "",
    key: str = "",
    ssldir: str = "",
    server_claims: Mapping[str, object] | None = None,
    action_policies: Mapping[str, str] | None = None,
    opa_policies: Mapping[str, str] | None = None,
    upgrade: str = "",
    msg: str = "",
) -> Answer:
    """Say how the server is to be configured.

    :param configuration: its configuration file; `plugin.choria.server.provision` must be false in it
    :param certificate: PEM; comes with `ca`
    :param key: PEM, when it was not the server that made the key
    :param ssldir: where the server is to keep them; only needed when it sent no CSR
    :param server_claims: for the JWT that the daemon signs for it: `ou`, `exp`, `collectives`, `pub_subjects`,
        `permissions`
    :param action_policies: text by file name ending in `.policy`
    :param opa_policies: text by file name ending in `.rego`
    :param upgrade: the version of Choria that it is to run
    """
    texts = {"certificate": certificate, "ca": ca, "key": key, "ssldir": ssldir, "upgrade": upgrade, "msg": msg}
    policies = {"action_policies": action_policies, "opa_policies": opa_policies}
    given = {**texts, **policies, "server_claims": server_claims}
    wanted = {"configuration": configuration} | {name: value for name, value in given.items() if value}
    # what is not a mapping either is told by the check
    return {name: dict(value) if isinstance(value, Mapping) else value for name, value in wanted.items()}


def defer(msg: str) -> NoReturn:
    """End here: the server is to wait, and is looked at again with a later discovery.

    :param msg: why; the daemon logs it
    """
    raise _Decided({"defer": True, "msg": msg})


def shutdown(msg: str = "") -> NoReturn:
    """End here: the server is to shut down, and stays down until somebody starts it."""
    raise _Decided({"shutdown": True, "msg": msg})


def fail(msg: str) -> NoReturn:
    """End here: something is wrong. The daemon logs it, counts a failure and tries again later.

    :param msg: what, on one line, without secrets
    """
    raise HelperError(msg)


def read_text(file: str | os.PathLike[str]) -> str:
    """Read a file of the site, as UTF-8. (It takes a tenth of a helper's time to import `pathlib`.)

    :raises OSError: when that does not work; it is told by the name of the file
    """
    with open(file, encoding="utf-8") as text:  # noqa: PTH123 - see above
        return text.read()


def run(decide: Callable[[Server], Answer]) -> None:
    """Read the input, decide, print the answer: all that a helper does.

    What is printed in the meantime, by other programs too, goes to standard error, which the daemon logs at debug. When
    standard error is a terminal, an unexpected exception is told with its traceback.

    :param decide: given the server, gives what :func:`configure` gives, or ends with :func:`defer`, :func:`shutdown`
        or :func:`fail`
    """
    sys.excepthook = _tell
    if sys.stdin.isatty():
        fail(
            "the input comes on standard input: add <FILE, which `choria-provisioner helper IDENTITY --save FILE` makes"
        )
    document = sys.stdin.buffer.read()
    with os.fdopen(os.dup(_STDOUT), "wb") as stdout:
        # what was printed before, and waits in Python's buffer, goes there as well
        os.dup2(_STDERR, _STDOUT)
        stdout.write(_encoded(_decided(decide, Server(_parsed(document)))))


def try_out(decide: Callable[[Server], Answer], document: Mapping[str, Any] | str | os.PathLike[str]) -> Answer:
    """Decide as :func:`run` does, but give the answer: for tests.

    :param document: the file in which `choria-provisioner helper IDENTITY --save FILE` has saved an input, or an input
        that was made up. Members that are not needed may be missing, and `inventory` may be an object
    :raises HelperError: the helper fails
    :raises AnswerError: the daemon would refuse the answer
    """
    if not isinstance(document, Mapping):
        document = _parsed(read_text(document))
    answer: Answer = json.loads(_encoded(_decided(decide, Server(document))))
    return answer


class _Decided(BaseException):
    """It is decided what to answer; not an Exception, so that no author catches it by accident."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        super().__init__()


def _parsed(document: str | bytes) -> dict[str, Any]:
    try:
        members = json.loads(document)
    except (ValueError, RecursionError):
        raise HelperError("the input is none of the daemon's: not JSON") from None
    if not isinstance(members, dict):
        raise HelperError("the input is none of the daemon's: no JSON object")
    return members


def _inventory(inventory: object) -> dict[str, Any]:
    if isinstance(inventory, str):
        try:
            inventory = json.loads(inventory)
        except (ValueError, RecursionError):
            raise HelperError("the input is none of the daemon's: inventory: no text that holds JSON") from None
    if not isinstance(inventory, dict):
        raise HelperError("the inventory of the server is no JSON object")
    return inventory


def _text(members: Mapping[str, Any], name: str, path: str = "") -> str:
    text = members.get(name)
    if not isinstance(text, str):
        raise HelperError(f"the input is none of the daemon's: {path}{name}: a string is wanted")
    return text


def _decided(decide: Callable[[Server], Answer], server: Server) -> Answer:
    """Decide, and check the answer.

    :raises AnswerError: the daemon would refuse it
    """
    answer = _said(decide, server)
    if not isinstance(answer, dict):
        came = "nothing" if answer is None else f"a {type(answer).__name__}"
        raise HelperError(f"decide returned {came}: return what configure() gives")
    _check_names(answer)
    for warning in contract.check(
        contract.read(contract.document(_encoded(answer))),
        identity=server.identity,
        csr_ssldir=server.csr.ssldir if server.document.get("csr") is not None else None,
        provision_default=server.jwt.get("chpd") is True if server.document.get("jwt") is not None else None,
        # whether it is heeded is the daemon's setting
        upgrades=True,
    ):
        print(f"warning: {warning}", file=sys.stderr)
    return answer


def _said(decide: Callable[[Server], Answer], server: Server) -> object:
    """Give what it returned, which may be anything, or has ended with."""
    try:
        return decide(server)
    except _Decided as decided:
        return decided.answer
    except SystemExit as leaving:
        if leaving.code:
            raise
        raise HelperError("decide ended the program without an answer: return what configure() gives") from None


def _check_names(answer: Mapping[str, Any], path: str = "") -> None:
    """The daemon ignores members that it does not know, and so what was meant by a name with a typing error."""
    known = _MEMBERS[path]
    for name, value in answer.items():
        if name not in known:
            raise AnswerError(
                f"{path}{'.' if path else ''}{name!s:.80}: there is no such member, but {', '.join(known)}"
            )
        if name in _MEMBERS and isinstance(value, dict):
            _check_names(value, name)


def _encoded(answer: Answer) -> bytes:
    try:
        text = json.dumps(answer).encode()
    except (TypeError, ValueError, RecursionError):
        contract.read(answer)
        raise AnswerError("something in it cannot be written as JSON") from None
    if len(text) > contract.ANSWER_LIMIT_BYTES:
        raise AnswerError(f"it is longer than {contract.ANSWER_LIMIT_BYTES} bytes")
    return text


def _tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Tell in one line why the helper ends."""
    if isinstance(error, ProvisionerError):
        line = str(error)
    elif isinstance(error, OSError) and error.filename:
        line = f"{error.filename}: {error.strerror}{_place(trace)}"
    else:
        line = f"{kind.__name__}: {error}".removesuffix(": ") + _place(trace)
    if sys.stderr.isatty() and not isinstance(error, ProvisionerError):
        sys.__excepthook__(kind, error, trace)
    told = line if len(line) <= TOLD_CHARACTERS else f"{line[: TOLD_CHARACTERS - 1]}…"
    print("".join(char if char.isprintable() else " " for char in told), file=sys.stderr)


def _place(trace: TracebackType | None) -> str:
    """Name the last line of the helper itself that was under way."""
    place = ""
    while trace:
        # not by its name: the command may have it relative to a folder, and the code does not
        if trace.tb_frame.f_globals.get("__name__") == "__main__":
            place = f" (line {trace.tb_lineno} of {trace.tb_frame.f_code.co_filename.rpartition('/')[2]})"
        trace = trace.tb_next
    return place
