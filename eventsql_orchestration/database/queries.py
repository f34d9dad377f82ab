"""Named SQL: every hot statement stands in a file under `sql/`, under its name and one line that describes it.

A file is a sequence of `-- name -- description` headers, each followed by one statement. The description may go on in
comment lines. `{schema}` and names such as `{event_table}` are composed as identifiers; values are always parameters.

`-- part name -- description` is the header of a text that later statements of the file contain as `{name}`. A statement
with `{in_partition}` exists twice: under its name it looks at all partitions, as `name_partition` at one.
"""

from __future__ import annotations

import re
import string
from functools import cache
from importlib import resources
from typing import Final

from psycopg import sql

from eventsql_orchestration.qualification import qualified

_HEADER: Final = re.compile(r"^-- (?P<part>part )?(?P<name>[a-z_]+) --(?P<description>.*)$", re.MULTILINE)

_IN_PARTITION: Final = "{in_partition} "


@cache
def _statements(file: str) -> dict[str, str]:
    text = resources.files(__package__).joinpath("sql", f"{file}.sql").read_text(encoding="utf-8")
    headers = list(_HEADER.finditer(text))
    ends = [header.start() for header in headers[1:]] + [len(text)]
    parts: dict[str, str] = {}
    statements: dict[str, str] = {}
    for header, end in zip(headers, ends, strict=True):
        name = header["name"]
        if name in statements or name in parts:
            raise ValueError(f"{file}.sql names {name!r} twice")

        # Further lines of the description would travel to the server with every call.
        lines = [line for line in text[header.end() : end].splitlines() if not line.startswith("--")]
        body = "\n".join(lines).strip().removesuffix(";")
        for part, contents in parts.items():
            body = body.replace(f"{{{part}}}", contents)

        if header["part"]:
            parts[name] = body
            continue
        statements[name] = qualified(body.replace(_IN_PARTITION, ""))
        if _IN_PARTITION in body:
            one = body.replace(_IN_PARTITION, "eql_partition = %(partition)s AND ")
            if f"{name}_partition" in statements:
                raise ValueError(f"{file}.sql names {name + '_partition'!r} twice")
            statements[f"{name}_partition"] = qualified(one)
    return statements


def statement(file: str, name: str) -> str:
    """The text of one statement, to be composed with other names than a topic's."""
    return _statements(file)[name]


_FOLDED: Final = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)


def event_table(topic: str) -> str:
    """The name of the table that holds a topic's ordered log.

    In lower case: EventSQL's Java library writes it unquoted, and PostgreSQL folds such a name so.
    """
    return f"{topic.translate(_FOLDED)}_event"


class Queries:
    """The statements of one file, composed for one database schema and, where they ask for it, one topic."""

    def __init__(self, file: str, schema: str) -> None:
        self._file = file
        self._schema = schema
        self._composed: dict[tuple[str, str | None, str | None], sql.SQL] = {}

    def __call__(self, name: str, *, topic: str | None = None, segment: str | None = None) -> sql.SQL:
        """The statement called `name`; `topic` fills `{event_table}`, a segment's table `{segment}`."""
        composed = self._composed.get((name, topic, segment))
        if composed is None:
            identifiers = {"schema": sql.Identifier(self._schema)}
            if topic is not None:
                identifiers["event_table"] = sql.Identifier(event_table(topic))
            if segment is not None:
                identifiers["segment"] = sql.Identifier(segment)
            # The text comes from a file of this package, never from a caller.
            text = _statements(self._file)[name]
            # Rendered once: with nothing but identifiers in it, it is the same for every connection.
            composed = self._composed[name, topic, segment] = sql.SQL(sql.SQL(text).format(**identifiers).as_string())
        return composed
