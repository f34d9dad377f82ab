"""Lines of logs, to be written and as they are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

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


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line of a resource. `id` grows in the order in which lines were stored."""

    id: int
    resource: str
    level: str
    line: str
    attributes: dict[str, Any]
    written_at: datetime
