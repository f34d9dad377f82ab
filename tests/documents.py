"""The examples of the documents, and how a test runs them as they stand."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

REPOSITORY: Final = Path(__file__).parents[1]
DOCS: Final = REPOSITORY / "docs"
DAGSTER: Final = DOCS / "dagster.md"


def examples(document: Path, mark: str = "") -> list[str]:
    """The blocks of Python of a document, or those that have the text `mark`."""
    blocks = re.findall(r"^```python\n(.*?)^```", document.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [block for block in blocks if mark in block]


def play(code: str, given: Mapping[str, Any] | None = None, **urls: str) -> dict[str, Any]:
    """Run an example with some given names, whose URLs lead to databases of the test. Returns its names."""
    for shown, url in urls.items():
        assert code.count(f"@{shown}/app") == 1
        code = re.sub(rf"postgresql://app:secret@{shown}/app", url, code)
    names: dict[str, Any] = {"__name__": "example", **(given or {})}
    exec(compile(code, "example", "exec", dont_inherit=True), names)
    return names
