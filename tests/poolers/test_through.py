"""The list of the tests that `--through-pooler` leaves out."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.poolers.through import LEFT_OUT

PROJECT = Path(__file__).parents[2]


@pytest.mark.parametrize("left_out", LEFT_OUT)
def test_each_entry_is_the_beginning_of_a_test(left_out: str) -> None:
    path, _, beginning = left_out.partition("::")
    nodes = ast.walk(ast.parse((PROJECT / path).read_text(encoding="utf-8")))
    tests = [node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    assert any(test.startswith(beginning or "test_") for test in tests)
