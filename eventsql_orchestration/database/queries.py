"""Named SQL: every hot statement stands in a file under `sql/` of a room, with its name and a line that describes it.

A file is a sequence of `-- name -- description` headers, each followed by one statement. The description may go on in
comment lines. `{schema}` and names such as `{table}` are composed as identifiers; values are always parameters.

`-- part name -- description` is the header of a part: later statements of the file contain its text as `{name}`. A part
`-- part name of given -- description` takes an expression: statements contain it as `{name of expression}`, and the
expression replaces `{given}` in its text. A file that begins with lines `-- parts of other` has the parts of these
files, too. A statement with `{in_partition}` exists twice: under its name it looks at all partitions, under
`name_partition` at one partition.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import resources
from typing import Final, NamedTuple

from psycopg import sql

from eventsql_orchestration.qualification import qualified

_HEADER: Final = re.compile(
    r"^-- (?P<part>part )?(?P<name>[a-z_]+)(?: of (?P<given>[a-z]+))? --(?P<description>.*)$", re.MULTILINE
)

_PARTS_OF: Final = re.compile(r"-- parts of (?P<file>[a-z_]+)\n")

_MOST_COMPOSED: Final = 10_000
"""The most statements that are kept composed: a constant in a statement may take any number of values."""

_IN_PARTITION: Final = "{in_partition} "


def _statements(file: str, room: str = __package__) -> dict[str, str]:
    return _read(file, room)[1]


class _Part(NamedTuple):
    """A text of statements. `given` is the name of the expression that it takes; None if it takes none."""

    text: str
    given: str | None

    def put(self, name: str, into: str) -> str:
        """A statement with this part, called `name`, in the places that name it."""
        if self.given is None:
            return into.replace(f"{{{name}}}", self.text)
        place = f"{{{self.given}}}"
        return re.sub(rf"\{{{name} of ([^{{}}]+)\}}", lambda found: self.text.replace(place, found[1]), into)


@cache
def _read(file: str, room: str) -> tuple[dict[str, _Part], dict[str, str]]:
    """The parts and the statements of a file, by their names."""
    text = resources.files(room).joinpath("sql", f"{file}.sql").read_text(encoding="utf-8")
    headers = list(_HEADER.finditer(text))
    ends = [header.start() for header in headers[1:]] + [len(text)]
    parts: dict[str, _Part] = {}
    start = 0
    while others := _PARTS_OF.match(text, start):
        parts.update(_read(others["file"], room)[0])
        start = others.end()
    statements: dict[str, str] = {}
    for header, end in zip(headers, ends, strict=True):
        name = header["name"]
        if name in statements or name in parts:
            raise ValueError(f"{file}.sql names {name!r} twice")

        # Further lines of the description would travel to the server with every call.
        lines = [line for line in text[header.end() : end].splitlines() if not line.startswith("--")]
        body = "\n".join(lines).strip().removesuffix(";")
        if header["part"]:
            parts[name] = _Part(body, header["given"])
            continue

        # A part may contain others, and so may the expression that it is given.
        before = None
        while body != before:
            before = body
            for part, contents in parts.items():
                body = contents.put(part, body)
        statements[name] = qualified(body.replace(_IN_PARTITION, ""))
        if _IN_PARTITION in body:
            one = body.replace(_IN_PARTITION, "eql_partition = %(partition)s AND ")
            if f"{name}_partition" in statements:
                raise ValueError(f"{file}.sql names {name + '_partition'!r} twice")
            statements[f"{name}_partition"] = qualified(one)
    return parts, statements


def statement(file: str, name: str) -> str:
    """The text of one statement, for callers that compose its names themselves."""
    return _statements(file)[name]


def identifier(*names: str) -> sql.SQL:
    """A caller's name, with its schema or alone, for a statement with values: there, a % stands before a value."""
    return sql.SQL(sql.Identifier(*names).as_string().replace("%", "%%"))


class Queries:
    """The statements of one file, composed for one database schema and for further names that they contain."""

    def __init__(self, file: str, schema: str, *, room: str = __package__) -> None:
        """`room` is the package that has the file, in its directory `sql`."""
        self._file = file
        self._room = room
        self.schema = schema
        self._composed: dict[tuple[str, tuple[tuple[str, str | int], ...]], sql.SQL] = {}

    def __contains__(self, name: str) -> bool:
        return name in _statements(self._file, self._room)

    def __call__(self, name: str, **names: str | int) -> sql.SQL:
        """The statement called `name`. Each of `names` is an identifier for its placeholder: `table` for `{table}`.

        A number is a constant of the statement.
        """
        key = name, tuple(names.items())
        composed = self._composed.get(key)
        if composed is None:
            identifiers: dict[str, sql.Composable] = {
                each: sql.Identifier(given) if isinstance(given, str) else sql.Literal(given)
                for each, given in names.items()
            }
            # The text comes from a file of this package, never from a caller.
            text = sql.SQL(_statements(self._file, self._room)[name])
            # Rendered once: with nothing but identifiers in it, it is the same for every connection.
            rendered = text.format(schema=sql.Identifier(self.schema), **identifiers).as_string()
            composed = sql.SQL(rendered)
            if len(self._composed) >= _MOST_COMPOSED:
                self._composed.clear()
            self._composed[key] = composed
        return composed
