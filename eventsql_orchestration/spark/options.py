"""Options as Spark hands them over, and those of a write, checked: every error names the option."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, overload

from eventsql_orchestration.errors import ConfigurationError, InvalidPublicationError, ValidationError
from eventsql_orchestration.model import Publication, check_topic_name

MAX_BIGINT: Final = 2**63 - 1

DATABASE: Final = ("dsn", "schema")
_WRITE: Final = (*DATABASE, "topic", "headers", "writerId", "batchId", "claim")
_HEADER: Final = "header."


@dataclass(frozen=True, slots=True)
class Source:
    """The database of a read or a write.

    `dsn` is libpq's URL, with the password; `label` is the one to show.
    """

    dsn: str = field(repr=False)
    schema: str
    label: str


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """What to write as.

    `topic` is None where a column names it, `writer` where nobody named one. `headers` goes into every event's
    metadata.
    """

    source: Source
    topic: str | None
    headers: Mapping[str, str]
    writer: str | None
    batch: int
    claim: int | None

    @classmethod
    def parse(cls, options: Mapping[str, str], *, streaming: bool) -> WriteOptions:
        """Raises `ConfigurationError` or `ValidationError`."""
        given = Given(options, _WRITE, prefix=_HEADER)
        if streaming:
            given.refuse("batchId", "a stream numbers its batches itself")
            given.refuse("claim", "a stream keeps its progress in its checkpoint")
        claim = given.number("claim", 1, MAX_BIGINT)
        writer = given.text("writerId")
        if writer is None and claim is not None:
            writer = f"claim-{claim}"
        return cls(
            source=given.source(),
            topic=given.topic("topic"),
            headers=given.headers("headers"),
            writer=writer,
            batch=given.number("batchId", 0, MAX_BIGINT, default=0),
            claim=claim,
        )


class Given:
    """The options as Spark hands them over: strings under names whose case does not matter."""

    def __init__(self, options: Mapping[str, str], known: tuple[str, ...], *, prefix: str | None = None) -> None:
        self._options = {name.lower(): value for name, value in options.items()}
        self._prefix = prefix
        names = {name.lower(): name for name in known}
        for name in self._options:
            if name in names or (prefix is not None and name.startswith(prefix)):
                continue
            # Spark adds options of its own, so an unknown one is refused only where it looks like one of ours.
            if near := difflib.get_close_matches(name, names, n=1, cutoff=0.8):
                raise ConfigurationError(f"option {name} is not known: is {names[near[0]]} meant?")

    def source(self) -> Source:
        # Not for the tasks, which import this module too: these load longer than a small range is read.
        from eventsql_orchestration.database import Database  # noqa: PLC0415
        from eventsql_orchestration.settings import Settings  # noqa: PLC0415

        settings = Settings.load(dsn=self.text("dsn"), schema=self.text("schema"))
        if settings.dsn is None:
            raise ConfigurationError("option dsn is missing: it names the database, and so does EVENTSQL_DSN")
        database = Database(settings.dsn.get_secret_value(), schema=settings.db_schema)
        return Source(database.dsn, database.schema, str(database))

    def text(self, name: str) -> str | None:
        value = self._options.get(name.lower())
        if value is not None and not value.strip():
            raise ValidationError(f"option {name} is empty")
        return value

    def topic(self, name: str) -> str | None:
        value = self.text(name)
        if value is not None:
            try:
                check_topic_name(value)
            except ValidationError as error:
                raise type(error)(f"option {name}: {error}") from None
        return value

    @overload
    def number(self, name: str, least: int, most: int) -> int | None: ...
    @overload
    def number(self, name: str, least: int, most: int, *, default: int) -> int: ...
    def number(self, name: str, least: int, most: int, *, default: int | None = None) -> int | None:
        value = self.text(name)
        if value is None:
            return default
        try:
            number = int(value)
        except ValueError:
            raise ValidationError(f"option {name}: {value!r} is not a whole number") from None
        if not least <= number <= most:
            raise ValidationError(f"option {name}: {number} is out of range, {least} to {most}")
        return number

    def flag(self, name: str, *, default: bool = False) -> bool:
        value = (self.text(name) or str(default)).lower()
        if value not in ("true", "false"):
            raise ValidationError(f"option {name}: {value!r} is neither true nor false")
        return value == "true"

    def headers(self, name: str) -> dict[str, str]:
        try:
            headers = json.loads(self.text(name) or "{}")
        except ValueError:
            raise ValidationError(f"option {name} is not JSON: take an object of strings") from None
        if not isinstance(headers, dict):
            raise ValidationError(f"option {name} is not an object of strings")
        prefix = self._prefix or ""
        headers |= {each.removeprefix(prefix): text for each, text in self._options.items() if each.startswith(prefix)}
        try:
            return dict(Publication("headers", b"", metadata=headers).metadata)
        except InvalidPublicationError as error:
            raise InvalidPublicationError(f"option {name} or {prefix}<name>: {error}") from None

    def refuse(self, name: str, reason: str) -> None:
        if self.text(name) is not None:
            raise ConfigurationError(f"option {name} cannot be used here: {reason}")

    def exclusive(self, name: str, other: str) -> None:
        """Raises `ConfigurationError` where both are given."""
        if self.text(name) is not None:
            self.refuse(other, f"{name} is given")

    def word(self, name: str, words: Sequence[str]) -> str:
        """One of `words`, in lower case; the first where nothing is given."""
        value = (self.text(name) or words[0]).lower()
        if value not in words:
            raise ValidationError(f"option {name}: {value!r} is not known: take {' or '.join(words)}")
        return value
