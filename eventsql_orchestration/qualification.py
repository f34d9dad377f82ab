"""Names in SQL that no search_path can capture: every function, operator, type and collation is the server's own.

PostgreSQL looks unqualified names up along the session's `search_path`, and the best match of all schemas on it wins.
A role that may create objects in one of these schemas, as every role may in `public` of an upgraded database, could
make another session run these objects with the rights of that session. The statements of this package also run on
callers' and poolers' connections, whose path the package cannot choose. So the statements are written in plain SQL, and
`qualified` adds `pg_catalog` to each name before a statement is sent.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

_TOKEN: Final = re.compile(
    r"""(?P<space>\s+|--[^\n]*)
    |(?P<text>[eE]'(?:[^'\\]|\\.|'')*'|'(?:[^']|'')*')
    |(?P<name>"(?:[^"]|"")*"|\{\w*\}|[a-z_]\w*)
    |(?P<keyword>[A-Z]\w*)
    |(?P<value>%(?:\(\w+\))?[sb]|\$\d+|\d+(?:\.\d+)?)
    |(?P<mark>::|=>|:=|:|[()\[\],;.])
    |(?P<operator>(?:%%|[-+*/<>=~!@\#&|^])+)""",
    re.VERBOSE | re.DOTALL,
)

_SYNTAX: Final = frozenset({"coalesce", "extract", "greatest", "least", "position", "substring"})
"""Syntax that looks like a function: its meaning is fixed."""

_SYNTAX_TYPES: Final = frozenset(
    {"bigint", "boolean", "int", "integer", "interval", "numeric", "smallint", "timestamp"}
)
"""The names of types that are syntax as well."""

_UNQUALIFIABLE: Final = {
    ("IN", "("): "= ANY (ARRAY[…]) or = ANY (SELECT …)",
    ("DISTINCT", "FROM"): "= with IS TRUE or IS NOT TRUE",
    ("LIKE", None): "~~",
    ("ILIKE", None): "~~*",
    ("BETWEEN", None): ">= and <=",
    ("NULLIF", None): "CASE WHEN",
    ("USING", "("): "ON",
}
"""Syntax that PostgreSQL reads as an operator by its unqualified name: the keyword, the next token if it matters, and
the form to write instead."""

_END_OF_SET: Final = frozenset({"WHERE", "FROM", "RETURNING"})


class _Token(NamedTuple):
    kind: str
    text: str


def qualified(text: str) -> str:
    """A statement with `pg_catalog` before each name of a function, operator, type, system table or collation.

    Keywords are in capitals, names are not, and a function's name is directly before its parenthesis. A qualified
    operator binds tighter than AND, OR, NOT and IS. All qualified operators bind alike, from left to right: put an
    operation on the right of an operator in parentheses. Names that are qualified already stay as they are.

    Raises `ValueError` for text that it cannot read, and for syntax that stands for an operator it cannot qualify.
    """
    tokens = _tokens(text)
    significant = [number for number, token in enumerate(tokens) if token.kind != "space"]
    read = [tokens[number] for number in significant]
    in_set, depth = {0: False}, 0
    for place, number in enumerate(significant):
        token = read[place]
        _refuse_unqualifiable(read, place)
        if token.text == "(":
            depth += 1
            in_set[depth] = False
        elif token.text == ")":
            depth -= 1
        elif token == ("keyword", "SET"):
            in_set[depth] = True
        elif token.kind == "keyword" and token.text in _END_OF_SET:
            in_set[depth] = False

        if token.kind == "name":
            called = number + 1 < len(tokens) and tokens[number + 1].text == "("
            tokens[number] = token._replace(text=_name(read, place, called=called))
        elif token.kind == "operator" and not (in_set[depth] and _assigns(read, place)):
            tokens[number] = token._replace(text=_operator(read, place))
    return "".join(token.text for token in tokens)


def _tokens(text: str) -> list[_Token]:
    tokens: list[_Token] = []
    end = 0
    while end < len(text):
        found = _TOKEN.match(text, end)
        if found is None or found.lastgroup is None:
            raise ValueError(f"this cannot be qualified: {text[end : end + 40]!r}")
        tokens.append(_Token(found.lastgroup, found[0]))
        end = found.end()
    return tokens


def _text(read: Sequence[_Token], place: int) -> str:
    return read[place].text if 0 <= place < len(read) else ""


def _refuse_unqualifiable(read: Sequence[_Token], place: int) -> None:
    word = read[place].text
    if read[place].kind != "keyword":
        return
    instead = _UNQUALIFIABLE.get((word, None)) or _UNQUALIFIABLE.get((word, _text(read, place + 1)))
    if word == "CASE" and _text(read, place + 1) != "WHEN":
        instead = "CASE WHEN … = …"
    if instead is not None and not (word == "BETWEEN" and _text(read, place - 1) == "ROWS"):
        raise ValueError(f"the operator behind {word} cannot be qualified: write {instead}")


def _name(read: Sequence[_Token], place: int, *, called: bool) -> str:
    name, before = read[place].text, _text(read, place - 1)
    if before in (".", "AS") or name.startswith("{") or _text(read, place + 1) == ".":
        return name
    of_catalog = (
        (called and name not in _SYNTAX and not (name == "unnest" and _arguments(read, place + 1) > 1))
        or (before == "::" and name not in _SYNTAX_TYPES)
        or before == "COLLATE"
        or name.startswith("pg_")
    )
    return f"pg_catalog.{name}" if of_catalog else name


def _arguments(read: Sequence[_Token], opening: int) -> int:
    """The number of arguments of a call; `unnest` of several arrays is syntax, and has no name to qualify."""
    depth, commas = 0, 0
    for token in read[opening:]:
        depth += (token.text in ("(", "[")) - (token.text in (")", "]"))
        if depth == 0:
            break
        commas += depth == 1 and token.text == ","
    return commas + 1


def _assigns(read: Sequence[_Token], place: int) -> bool:
    """Whether an operator within SET is the sign after a column's name."""
    return read[place].text == "=" and read[place - 1].kind == "name" and _text(read, place - 2) in ("SET", ",")


def _operator(read: Sequence[_Token], place: int) -> str:
    sign, before = read[place].text, read[place - 1] if place else _Token("mark", "(")
    if before.text == ".":
        return sign
    begins = (before.kind == "keyword" and before.text != "END") or before.kind == "operator" or before.text in "([,"
    if begins and (sign == "*" or read[place + 1].kind == "value"):
        # All columns or rows, or the sign of a number.
        return sign
    return f"OPERATOR(pg_catalog.{sign})"
