"""The page about reliability claims nothing that no test shows, and forgets no test."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "docs" / "reliability.md").read_text()


def test_every_fault_has_its_row_and_every_row_its_test() -> None:
    modules = [file for file in (TESTS / "faults").glob("test_*.py") if file.name != "test_proxy.py"]
    functions = [
        node for file in modules for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)
    ]
    tests = {node.name for node in functions if node.name.startswith("test_")}

    assert set(re.findall(r"^\| `(test_\w+)` \|", PAGE, re.MULTILINE)) == tests


def test_modules_that_are_named_are_there() -> None:
    named = set(re.findall(r"`(?:tests/)?([\w/]+\.py)`", PAGE))

    assert {name for name in named if not (TESTS / name).exists()} == set()
