"""A statement that a caller runs with a driver of its own, with the parameters as that driver takes them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, Literal, LiteralString, NamedTuple, TypeAlias

ParamStyle: TypeAlias = Literal["pyformat", "named", "numeric_dollar"]
"""`%(key)s`, `:key` or `$1`."""

_PLACEHOLDER: Final = re.compile(r"%\((\w+)\)s")


class Statement(NamedTuple):
    """SQL and its parameters: a dictionary, or for "numeric_dollar" a tuple.

    The SQL is of this package alone, and values are parameters. So its type is the one that psycopg demands.
    """

    sql: LiteralString
    parameters: Any


def rendered(text: str, values: Mapping[str, object], paramstyle: ParamStyle) -> Statement:
    """The statement of `text`, whose placeholders are `%(name)s`."""
    match paramstyle:
        case "pyformat":
            return Statement(text, dict(values))
        case "named":
            # SQLAlchemy does not replace a name directly before `::`.
            return Statement(_PLACEHOLDER.sub(r":\1 ", text), dict(values))
        case "numeric_dollar":
            numbers = {name: number for number, name in enumerate(values, 1)}
            return Statement(_PLACEHOLDER.sub(lambda found: f"${numbers[found[1]]}", text), tuple(values.values()))
