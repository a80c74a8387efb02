"""Every test that tests/FIELD_REPORTS.md names exists, and every report has an answer."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PAGE = (TESTS / "FIELD_REPORTS.md").read_text()
NAMED = sorted(set(re.findall(r"`([\w/.]+\.py)::(\w+)`", PAGE)))


@pytest.mark.parametrize("path,name", NAMED, ids=[f"{path}::{name}" for path, name in NAMED])
def test_a_named_test_exists(path: str, name: str) -> None:
    tree = ast.parse((TESTS / path).read_text())
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    assert name in functions


def test_every_report_has_an_answer() -> None:
    rows = [line.split("|")[1:-1] for line in PAGE.splitlines() if line.startswith("| ")]
    reports = [row for row in rows if row[0].strip() not in ("report", "wanted")]
    assert len(reports) == 40
    assert all(len(row) == 2 and row[1].strip() for row in reports)
