"""Lines of logs, to be written and as they are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from eventsql_orchestration.database.binary import decode_bigint, decode_jsonb, decode_text, decode_time
from eventsql_orchestration.database.single_statement import RawRow
from eventsql_orchestration.validation import check_name, check_text, check_time, encode_json

DEFAULT_LEVEL: Final = "info"


@dataclass(frozen=True, slots=True)
class LogEntry:
    """A line to write. `attributes` is a JSON object. Raises `ValidationError` for a line that cannot be stored."""

    resource: str
    line: str
    written_at: datetime
    level: str = DEFAULT_LEVEL
    attributes: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_name("resource", self.resource)
        check_text("line", self.line)
        check_time("written_at", self.written_at)
        check_name("level", self.level)
        self.encoded()

    def encoded(self) -> str:
        """The attributes as JSON."""
        return encode_json(f"attributes of a line of {self.resource!r}", self.attributes)


class LogLine:
    """A line of a resource; it cannot be changed. `id` grows in the order in which lines were stored.

    Its parts are decoded when they are read: finding a thousand lines takes 0.3 ms of the client, instead of 2 ms.
    """

    __slots__ = ("_row",)

    def __init__(self, row: RawRow) -> None:
        """`row` has id, resource, level, line, attributes and time, in PostgreSQL's binary format."""
        self._row = row

    @property
    def id(self) -> int:
        return decode_bigint(self._row[0])

    @property
    def resource(self) -> str:
        return decode_text(self._row[1])

    @property
    def level(self) -> str:
        return decode_text(self._row[2])

    @property
    def line(self) -> str:
        return decode_text(self._row[3])

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes, a new object each time."""
        attributes: dict[str, Any] = decode_jsonb(self._row[4])
        return attributes

    @property
    def written_at(self) -> datetime:
        """The time of the line, in UTC."""
        return decode_time(self._row[5])

    def __eq__(self, other: object) -> bool:
        return self._row == other._row if isinstance(other, LogLine) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._row)

    def __repr__(self) -> str:
        return f"<LogLine {self.id} {self.written_at:%Y-%m-%d %H:%M:%S} {self.resource} {self.level} {self.line!r}>"
