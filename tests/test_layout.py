"""The order of the house: who may import whom."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "provisioner"
#: What each package may import of the others. Modules at the top level are for all.
ALLOWED = {
    "choria": {"monitor"},
    "monitor": set(),
    "host": {"choria", "monitor"},
    "hosts": {"host", "choria", "monitor"},
    "simulate": {"choria", "monitor"},
    "cli": {"hosts", "host", "choria", "monitor", "simulate"},
}


def imported(file: Path) -> set[str]:
    """The packages of ours that a module imports."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            modules |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
    ours = {module.split(".")[1] for module in modules if module.startswith("provisioner.")}
    return ours & set(ALLOWED)


@pytest.mark.parametrize("file", sorted(ROOT.rglob("*.py")), ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_go_one_way(file: Path) -> None:
    package = file.relative_to(ROOT).parts[0]
    if package in ALLOWED:
        assert imported(file) <= ALLOWED[package] | {package}
    elif file.name != "__main__.py":
        assert not imported(file)
