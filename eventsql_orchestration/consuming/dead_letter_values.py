"""Dead letters as values: their metadata, the reasons for them, filters, and the events that they are redriven as.

A dead letter has the key, value and metadata of its event and, in further metadata, the reason (`dlt_*`). If it is
redriven, it becomes an event of its topic again: without `dlt_*`, in the partition that it came from, and traceable by

- `redriven_from`: the dead letter, as `topic:id`;
- `redriven_consumer`: the consumer that had given it up;
- `redriven_origin`: the event that was published first, as `topic:partition:id`, however often it was redriven since;
- `redriven_before`: the earlier dead letters that it was redriven from, oldest first, if there are any.

A letter that fails again keeps all of these.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeAlias

from eventsql_orchestration.consumer import ConsumerState
from eventsql_orchestration.errors import ValidationError
from eventsql_orchestration.model import DEAD_LETTER_SUFFIX, MAX_PARTITIONS, Event, Publication, Topic, decoded_time
from eventsql_orchestration.validation import (
    NO_METADATA,
    check_metadata,
    check_range,
    check_several,
    check_text,
    check_whole,
    storable,
)

CONSUMER: Final = "dlt_consumer"
EXCEPTION: Final = "dlt_exception"
MESSAGE: Final = "dlt_message"
ATTEMPTS: Final = "dlt_attempts"
SOURCE_TOPIC: Final = "dlt_topic"
SOURCE_PARTITION: Final = "dlt_partition"
SOURCE_OFFSET: Final = "dlt_offset"
BACKFILL: Final = "dlt_backfill"
"""The id of the backfill whose side consumer gave the event up."""

_CAUSE: Final = frozenset({
    CONSUMER, EXCEPTION, MESSAGE, ATTEMPTS, SOURCE_TOPIC, SOURCE_PARTITION, SOURCE_OFFSET, BACKFILL,
})  # fmt: skip

REDRIVEN_FROM: Final = "redriven_from"
REDRIVEN_CONSUMER: Final = "redriven_consumer"
REDRIVEN_ORIGIN: Final = "redriven_origin"
REDRIVEN_BEFORE: Final = "redriven_before"

KEPT_WHEN_ERASED: Final = (
    *sorted(_CAUSE - {MESSAGE}), REDRIVEN_FROM, REDRIVEN_CONSUMER, REDRIVEN_ORIGIN, REDRIVEN_BEFORE,
)  # fmt: skip
"""Metadata that stays when a dead letter is erased, because no part of it comes from the event. An error's message does
not stay: it may quote the event."""

MAX_CHAIN: Final = 100
"""Maximum number of letters in `redriven_before`, the last letters: an event may be redriven any number of times."""

MAX_MESSAGE_LENGTH: Final = 2_000

POINTER: Final = re.compile(r"\n[ \t]*\^$", re.MULTILINE)
"""PostgreSQL's pointer below the line of a statement: it says nothing where the lines are joined, as in tables."""

NEVER: Final = 100 * 365 * 86_400.0
"""Seconds until an event is due again if the factory made no dead letter of it: it waits for a resumption."""


def describe(error: BaseException) -> str:
    """A failure as storable text: `Type: message`, without NUL characters and pointers, cut at 2,000 characters."""
    try:
        said = str(error)
    except Exception:  # noqa: BLE001 - the class of an error may be the handler's
        said = "this error has no text, because its __str__ fails"
    return storable(f"{type(error).__name__}: {POINTER.sub('', said)}")[:MAX_MESSAGE_LENGTH]


@dataclass(frozen=True, slots=True)
class DeadLetterCause:
    """The reason why an event was given up. `exception` is the name of the type of the handler's error.

    If the event was erased meanwhile, `message` and `error` are not the handler's, because these may quote the event.
    """

    consumer: str
    exception: str
    message: str
    attempts: int
    error: BaseException

    @classmethod
    def of(cls, consumer: str, error: BaseException, attempts: int) -> DeadLetterCause:
        """The cause with its texts as they can be stored."""
        exception, _, message = describe(error).partition(": ")
        return cls(consumer, exception, message, attempts, error)


DeadLetterFactory: TypeAlias = Callable[[Event, DeadLetterCause], Publication | None]
"""Makes the dead letter of an event. If it returns None, the partition stops at the event."""


def dead_letter(event: Event, cause: DeadLetterCause) -> Publication:
    """The dead letter of an event unless a factory is configured. A factory may change it."""
    reason = {
        CONSUMER: cause.consumer, EXCEPTION: cause.exception, MESSAGE: cause.message, ATTEMPTS: str(cause.attempts),
        SOURCE_TOPIC: event.topic, SOURCE_PARTITION: str(event.partition), SOURCE_OFFSET: str(event.id),
    }  # fmt: skip
    return event.as_publication(event.topic + DEAD_LETTER_SUFFIX, **reason)


def tried(state: ConsumerState) -> str:
    """How often the event that a partition retries has failed, and its error."""
    # A range fails more often than its attempts if topic `<topic>_dlt` exists.
    of = "" if state.attempts > state.max_attempts else f" of {state.max_attempts}"
    return f"event {state.failed_event_id} failed {state.attempts}{of} times: {state.failure}"


def refused(state: ConsumerState) -> bool:
    """Whether the factory made no dead letter of the failed event: the partition waits for a resumption."""
    half = timedelta(seconds=NEVER / 2)
    return state.spent and state.retry_at is not None and state.retry_at > datetime.now(UTC) + half


class DeadLetter(Event):
    """An event of a dead letter topic. A letter is open until it is redriven, dismissed or erased.

    `redriven_at` is the time of its last redrive, and `dismissed_at` that of its dismissal. Only the later one is kept;
    both are None if there was neither. `shard` is set if several shards are listed together.
    """

    __slots__ = ("_dismissed_at", "_redriven_at", "shard")

    def __init__(
        self, topic: str, *columns: Any,
        redriven_at: datetime | int | None = None, dismissed_at: datetime | int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(topic, *columns)
        self._redriven_at = redriven_at
        self._dismissed_at = dismissed_at
        self.shard: str | None = None

    @property
    def redriven_at(self) -> datetime | None:
        return None if self._redriven_at is None else decoded_time(self._redriven_at)

    @property
    def dismissed_at(self) -> datetime | None:
        return None if self._dismissed_at is None else decoded_time(self._dismissed_at)

    @property
    def consumer(self) -> str | None:
        """The consumer that gave the event up."""
        return _text(self.metadata, CONSUMER)

    @property
    def origin(self) -> str | None:
        """The event that was given up, as `topic:partition:id`; None if the letter does not say."""
        parts = [_text(self.metadata, name) for name in (SOURCE_TOPIC, SOURCE_PARTITION, SOURCE_OFFSET)]
        return None if None in parts else ":".join(map(str, parts))


def _text(metadata: Mapping[str, Any], name: str) -> str | None:
    """A value as text. Another publisher may have written any JSON."""
    value = metadata.get(name)
    return value if value is None else storable(value if isinstance(value, str) else json.dumps(value))


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterFilter:
    """Selects dead letters that meet all given conditions. Without conditions, selects all but letters of backfills.

    The letters of a backfill are selected only if `backfill` is its id, or if `ids` names them: the live consumer has
    already consumed their events.

    `consumer` gave the events up, `exception` is the name of the error's type. Letters have this `key` and all of this
    `metadata`. `ids` are offsets in the dead letter topic; `after` is exclusive and `upto` inclusive. The events were
    given up at `since` or later and before `until`, times with a time zone.

    Raises `ValidationError`.
    """

    consumer: str | None = None
    backfill: str | None = None
    exception: str | None = None
    key: str | None = None
    metadata: Mapping[str, str] = field(default_factory=lambda: NO_METADATA)
    after: int = 0
    upto: int | None = None
    ids: Collection[int] | None = None
    since: datetime | None = None
    until: datetime | None = None

    def __post_init__(self) -> None:
        for what in ("consumer", "backfill", "exception", "key"):
            if (text := getattr(self, what)) is not None:
                check_text(what, text)
        object.__setattr__(self, "metadata", check_metadata(self.metadata))
        check_whole("after", self.after, least=0)
        if self.upto is not None and check_whole("upto", self.upto, least=0) < self.after:
            raise ValidationError(f"the range of offsets after {self.after} up to {self.upto} ends before it begins")
        if self.ids is not None:
            check_several("ids", self.ids)
            ids = sorted({check_whole("the id of a dead letter", each, least=1) for each in self.ids})
            object.__setattr__(self, "ids", tuple(ids))
        check_range(self.since, self.until)
        if self.since is not None and self.until is not None and self.since > self.until:
            raise ValidationError(f"since {self.since} until {self.until} is not a range of times: it ends too early")

    def parameters(self) -> dict[str, object]:
        """All conditions except the ids, as the statements take them."""
        return {
            "consumer": self.consumer, "backfill": self.backfill, "exception": self.exception, "key": self.key,
            "names": list(self.metadata) or None, "texts": list(self.metadata.values()),
            "since": self.since, "until": self.until,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class RedrivePlan:
    """A planned redrive of `letters`. It would redrive `redrives` of them.

    `redriven_before` were redriven or dismissed already.
    """

    letters: int
    redriven_before: int
    redrives: int


def redriven(target: Topic, letter: DeadLetter, *, repartitioned: bool) -> Publication:
    """The event of a letter as it was published, with metadata that says where it comes from.

    `repartitioned`: the target's number of partitions has changed.
    """
    publication = letter.as_publication(target.name)
    metadata = {name: text for name, text in publication.metadata.items() if name not in _CAUSE}
    if (before := metadata.get(REDRIVEN_FROM)) is not None:
        chain = [*metadata.get(REDRIVEN_BEFORE, "").split(), before]
        metadata[REDRIVEN_BEFORE] = " ".join(chain[-MAX_CHAIN:])
    metadata[REDRIVEN_FROM] = f"{letter.topic}:{letter.id}"
    if letter.consumer is not None:
        metadata[REDRIVEN_CONSUMER] = letter.consumer
    if letter.origin is not None:
        metadata.setdefault(REDRIVEN_ORIGIN, letter.origin)
    return replace(publication, metadata=metadata, partition=_source_partition(target, letter, repartitioned))


def _source_partition(target: Topic, letter: DeadLetter, repartitioned: bool) -> int | None:
    """The partition that a letter's event was in. The event's key may belong to another partition.

    None if the topic was made anew or repartitioned since, or has no such partition. The publisher chooses then.
    """
    if target.created_at is not None and target.created_at > letter.buffered_at:
        return None
    partition = _text(letter.metadata, SOURCE_PARTITION)
    if _text(letter.metadata, SOURCE_TOPIC) != target.name or partition is None:
        return None
    if repartitioned and letter.as_publication(target.name).key is not None:
        # The events of its key may be in another partition now.
        return None
    # Another program may have written any text here.
    known = partition.isdecimal() and len(partition) <= len(str(MAX_PARTITIONS)) and int(partition) < target.partitions
    return int(partition) if known else None
