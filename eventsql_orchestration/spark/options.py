"""Spark's options: the names for reads and writes, and the checked options of a write. Every error names the option."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, overload

from eventsql_orchestration.errors import ConfigurationError, ConsumerNotFoundError, ValidationError
from eventsql_orchestration.model import Publication, check_topic_name
from eventsql_orchestration.spark.ranges import EVENTS_PER_TASK
from eventsql_orchestration.validation import MAX_BIGINT, check_text, json_object, split_urls

MAX_WRITER_BYTES: Final = 2_000
"""An index has the name of the writer, and an entry of an index has at most 2,704 bytes."""

MAX_TASKS: Final = 100_000

DATABASE: Final = ("dsn", "schema")
STARTS: Final = ("startingOffsets", "startingTimestamp", "startingOffsetsByTimestamp")
ENDS: Final = ("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp")
TASKS: Final = ("numPartitions", "minPartitions", "maxRecordsPerPartition")

AGGREGATES: Final = "aggregates"
"""The option that reads the event store instead of topics."""

READ: Final = (
    *DATABASE, "subscribe", "assign", AGGREGATES, "claim", "partition",
    *STARTS, "startingOffsetsByTimestampStrategy", *ENDS,
    *TASKS, "maxOffsetsPerTrigger",
    "includeHeaders", "failOnDataLoss", "filter", "pushFilters", "consumer", "valueSchema", "mode",
)  # fmt: skip

_WRITE: Final = (*DATABASE, "topic", "headers", "writerId", "batchId", "claim", "claimShard")
_HEADER: Final = "header."


@dataclass(frozen=True, slots=True)
class Source:
    """The database of a read or a write, or the databases of all shards.

    `dsn` is libpq's URL with the password, or several URLs with spaces between them. `label` may be shown.
    """

    dsn: str = field(repr=False)
    schema: str
    label: str

    @classmethod
    def of(cls, urls: Iterable[str], schema: str) -> Source:
        """The source of one or several URLs. Raises `ConfigurationError`, without a password in it."""
        # Tasks import this module, too, and must not wait for the database floor to load.
        from eventsql_orchestration.database import Database  # noqa: PLC0415
        from eventsql_orchestration.database.urls import with_password_of_environment  # noqa: PLC0415

        databases = [Database(with_password_of_environment(url), schema=schema) for url in urls]
        return cls(" ".join(each.dsn for each in databases), schema, ", ".join(map(str, databases)))

    @property
    def urls(self) -> tuple[str, ...]:
        """The URL of each database, in the given order."""
        return split_urls(self.dsn)


@dataclass(frozen=True, slots=True)
class TaskOptions:
    """The number of tasks of a read: `exactly` this number, or at least `least`, each with about `rows` rows."""

    exactly: int | None
    least: int
    rows: int

    @classmethod
    def of(cls, given: Given) -> TaskOptions:
        """Raises `ConfigurationError` or `ValidationError`."""
        exactly, least, rows = TASKS
        given.exclusive(*TASKS)
        return cls(
            exactly=given.number(exactly, 1, MAX_TASKS),
            least=given.number(least, 1, MAX_TASKS, default=1),
            rows=given.number(rows, 1, MAX_BIGINT, default=EVENTS_PER_TASK),
        )

    def number(self, rows: int) -> int:
        """The number of tasks for this number of rows."""
        return self.exactly or max(self.least, -(-rows // self.rows))


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """The options of a write.

    `topic` is None if a column names it, `writer` is None without a name, `batch` without a number. `headers` go into
    every event's metadata. `claim_shard` is the shard of `claim`, if there are several.
    """

    source: Source
    topic: str | None
    headers: Mapping[str, str]
    writer: str | None
    batch: int | None
    claim: int | None
    claim_shard: str | None

    @classmethod
    def parse(cls, options: Mapping[str, str], *, streaming: bool) -> WriteOptions:
        """Raises `ConfigurationError` or `ValidationError`."""
        given = Given(options, (*_WRITE, *READ))
        given.refuse("it is for reads", *(name for name in READ if name not in _WRITE))
        if streaming:
            given.refuse("a stream numbers its batches itself", "batchId")
            given.refuse("a stream keeps its progress in its checkpoint", "claim")
        claim = given.number("claim", 1, MAX_BIGINT)
        batch = given.number("batchId", 0, MAX_BIGINT)
        topic, writer = given.text("topic"), given.text("writerId")
        if writer is not None:
            check_text("option writerId", writer, most=MAX_WRITER_BYTES)
        if claim is None:
            given.refuse("no claim is given", "claimShard")
            if writer is None:
                given.refuse("it numbers the batches of a writer, and no writerId is given", "batchId")
        return cls(
            source=given.source(),
            topic=None if topic is None else checked_topic("topic", topic),
            headers=given.headers(),
            writer=writer or (None if claim is None else f"claim-{claim}"),
            batch=batch,
            claim=claim,
            claim_shard=given.text("claimShard"),
        )


@contextmanager
def naming_option(name: str) -> Iterator[None]:
    """Add the option's name to errors of the block about its value."""
    try:
        yield
    except (ConfigurationError, ConsumerNotFoundError, ValidationError) as error:
        raise type(error)(f"{name}: {error}") from None


def checked_topic(option: str, name: str) -> str:
    """Return the topic's name of an option, or raise `InvalidNameError`."""
    with naming_option(f"option {option}"):
        return check_topic_name(name)


class Given:
    """Spark's options: strings by name, in upper or lower case."""

    def __init__(self, options: Mapping[str, str], known: tuple[str, ...]) -> None:
        self._options = {name.lower(): value for name, value in options.items()}
        names = {name.lower(): name for name in known}
        for name in self._options:
            if name in names or name.startswith(_HEADER):
                continue
            # Spark adds its own options, so an unknown option is refused only if it resembles an option of this
            # package.
            if near := difflib.get_close_matches(name, names, n=1, cutoff=0.8):
                raise ConfigurationError(f"option {name} is not known: did you mean {names[near[0]]}?")

    def source(self) -> Source:
        """The named databases. Raises `ConfigurationError`."""
        # Tasks import this module, too; see `Source.of`.
        from eventsql_orchestration.settings import Settings  # noqa: PLC0415

        dsn = self.text("dsn")
        settings = Settings.load(dsn=dsn, schema=self.text("schema"))
        if not settings.dsns:
            raise ConfigurationError("option dsn is missing: give the database's URL there or in EVENTSQL_DSN")
        with naming_option("option dsn" if dsn is not None else "EVENTSQL_DSN or eventsql.toml"):
            return Source.of(settings.dsns, settings.db_schema)

    def databases(self) -> int:
        """The number of named databases. Several are shards."""
        dsn = self.text("dsn")
        return len(split_urls(dsn)) if dsn is not None else len(self.source().urls)

    def text(self, name: str) -> str | None:
        value = self._options.get(name.lower())
        if value is not None and not value.strip():
            raise ValidationError(f"option {name} is empty")
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
            raise ValidationError(f"option {name}: {number} is out of range: write {least} to {most}")
        return number

    def flag(self, name: str, *, default: bool = False) -> bool:
        value = (self.text(name) or str(default)).lower()
        if value not in ("true", "false"):
            raise ValidationError(f"option {name}: {value!r} is neither true nor false")
        return value == "true"

    def headers(self) -> dict[str, str]:
        """The headers of the option `headers` and of the options `header.<name>`."""
        headers = json_object(self.text("headers") or "{}")
        if headers is None:
            raise ValidationError('option headers is not a JSON object of strings: write one such as {"a": "b"}')
        own = {name: text for name, text in self._options.items() if name.startswith(_HEADER)}
        headers |= {name.removeprefix(_HEADER): text for name, text in own.items()}
        with naming_option(f"option headers or {_HEADER}<name>"):
            return dict(Publication("headers", b"", metadata=headers).metadata)

    def refuse(self, reason: str, *names: str) -> None:
        """Raise `ConfigurationError` if one of these options is given."""
        for name in names:
            if self.text(name) is not None:
                raise ConfigurationError(f"option {name} cannot be used here: {reason}")

    def exclusive(self, name: str, *others: str) -> None:
        """Raise `ConfigurationError` if an option and one of the others are given."""
        if self.text(name) is not None:
            self.refuse(f"{name} is given", *others)

    def word(self, name: str, words: Sequence[str]) -> str:
        """One of `words`, in lower case; the first is the default."""
        value = (self.text(name) or words[0]).lower()
        if value not in words:
            raise ValidationError(f"option {name}: {value!r} is not known: write {' or '.join(words)}")
        return value
