"""Whether a table holds what the log says: the same checks for every orchestrator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

SHOWN: Final = 5


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of a check, with its figures."""

    passed: bool
    figures: Mapping[str, int | str]


def compared(expected: Mapping[Any, Any], found: Mapping[Any, Any]) -> Comparison:
    """Whether a table's rows, by their keys, are those that the log gives, and how many and which are not."""
    differing = [key for key, wanted in expected.items() if found.get(key) != wanted]
    beyond = found.keys() - expected.keys()
    return Comparison(
        not differing and not beyond,
        {
            "rows": len(expected),
            "rows that differ": len(differing),
            "rows beyond the log": len(beyond),
            "differing": str([*differing, *sorted(beyond)][:SHOWN]),
        },
    )
