"""The begin and the end of a read, from its options, for each topic, partition and shard."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal, TypeAlias, TypeGuard

from eventsql_orchestration.errors import ValidationError
from eventsql_orchestration.spark.options import Given
from eventsql_orchestration.validation import json_object

FIRST: Final = 1
"""The first offset that any topic can have."""

_MAX_MILLISECONDS: Final = 10**14

Bound: TypeAlias = Literal["earliest", "latest"] | int | datetime
"""An offset, a time, or an end of the log."""

TopicBound: TypeAlias = Bound | Mapping[int, Bound]
"""The bound of a topic, or of each of its partitions."""

_Parse: TypeAlias = Callable[[str, object], Bound]

_KAFKA_NUMBERS: Final[Mapping[int, Bound]] = {-2: "earliest", -1: "latest"}


@dataclass(frozen=True, slots=True)
class OffsetBounds:
    """Where a read begins, or where it ends.

    `option` is the option that gives the bounds. `whole` is the bound of all topics, `topics` has bounds by topic,
    `shards` by topic and shard. `given` is false for the default.
    """

    option: str
    whole: Bound
    topics: Mapping[str, TopicBound] = field(default_factory=dict)
    shards: Mapping[str, Mapping[str, TopicBound]] = field(default_factory=dict)
    given: bool = True

    def on(self, shard: str | None) -> OffsetBounds:
        """The bounds on one shard; all bounds for None."""
        if shard is None:
            return self
        own = {topic: given[shard] for topic, given in self.shards.items() if shard in given}
        return replace(self, topics={**self.topics, **own}, shards={})

    def check_shards(self, names: Collection[str]) -> None:
        """Raise `ValidationError` if a shard's bound is missing, or an unknown shard is named."""
        for topic, given in self.shards.items():
            if unknown := sorted(given.keys() - set(names)):
                raise ValidationError(
                    f"option {self.option}: topic {topic!r}: there is no shard {', '.join(unknown)}: name "
                    f"{', '.join(names)}"
                )
            if missing := [name for name in names if name not in given]:
                raise ValidationError(f"option {self.option}: topic {topic!r} lacks shard {', '.join(missing)}")

    @property
    def bounds(self) -> list[Bound]:
        topics = [*self.topics.values(), *(bound for given in self.shards.values() for bound in given.values())]
        several = [each.values() if isinstance(each, Mapping) else (each,) for each in topics or [self.whole]]
        return [bound for each in several for bound in each]

    def by_partition(self, topic: str) -> Mapping[int, Bound] | None:
        given = self.topics.get(topic)
        return given if isinstance(given, Mapping) else None

    def at(self, topic: str, partition: int) -> Bound:
        given = self.topics.get(topic, self.whole)
        return given[partition] if isinstance(given, Mapping) else given


def parse_bounds(
    given: Given, names: tuple[str, str, str], topics: Collection[str], *, default: Bound, several: bool
) -> OffsetBounds:
    """The bounds that one of three options gives: by offsets, by one time, by times.

    With `several` shards, each needs offsets of its own. Raises `ValidationError`, or `ConfigurationError` if two of
    the options are given.
    """
    by_offset, by_time, by_times = names
    given.exclusive(by_offset, by_time, by_times)
    given.exclusive(by_time, by_times)
    if (text := given.text(by_offset)) is not None:
        if text.lstrip().startswith("{"):
            return _by_topic(by_offset, text, topics, _offset, default=default, several=several)
        return OffsetBounds(by_offset, _everywhere(by_offset, _offset(by_offset, text), several=several))
    if (text := given.text(by_time)) is not None:
        return OffsetBounds(by_time, _time(by_time, text))
    if (text := given.text(by_times)) is not None:
        return _by_topic(by_times, text, topics, _time, default=default, several=several)
    return OffsetBounds(by_offset, default, given=False)


def _everywhere(option: str, bound: Bound, *, several: bool) -> Bound:
    """A bound for all shards."""
    if several and isinstance(bound, int):
        raise ValidationError(
            f"option {option}: offset {bound} belongs to one shard, and dsn names several: give an offset for each, "
            'such as {"orders": {"shard-1": 23, "shard-2": "earliest"}}'
        )
    return bound


def _by_topic(
    option: str, text: str, topics: Collection[str], parse: _Parse, *, default: Bound, several: bool
) -> OffsetBounds:
    whole: dict[str, TopicBound] = {}
    shards: dict[str, Mapping[str, TopicBound]] = {}
    for topic, bound in object_in(option, text, '{"orders": 23}').items():
        if topic not in topics:
            raise ValidationError(f"option {option}: topic {topic!r} is not read: name {', '.join(topics)}")
        if several and isinstance(bound, dict):
            shards[topic] = {shard: _topic_bound(option, topic, each, parse) for shard, each in bound.items()}
        elif several:
            whole[topic] = _everywhere(option, parse(option, bound), several=True)
        else:
            whole[topic] = _topic_bound(option, topic, bound, parse)
    if missing := sorted(set(topics) - whole.keys() - shards.keys()):
        raise ValidationError(f"option {option}: topic {', '.join(missing)} is missing")
    return OffsetBounds(option, default, whole, shards)


def _topic_bound(option: str, topic: str, given: object, parse: _Parse) -> TopicBound:
    if not isinstance(given, dict):
        return parse(option, given)
    if not given or not all(name.isdecimal() for name in given):
        raise ValidationError(f'option {option}: name the partitions of topic {topic!r} by numbers, such as {{"0": 5}}')
    return {int(partition): parse(option, each) for partition, each in given.items()}


def object_in(option: str, text: str, example: str) -> dict[str, Any]:
    """The JSON object in an option. Raises `ValidationError`."""
    value = json_object(text)
    if value is None:
        raise ValidationError(f"option {option} is not a JSON object: write one such as {example}")
    return value


def _offset(option: str, value: object) -> Bound:
    match value.lower() if isinstance(value, str) else value:
        case "earliest" | "latest" as end:
            return end
    offset = _whole(value)
    if offset is None:
        raise ValidationError(f"option {option}: {value!r} is not a number: write an offset, earliest or latest")
    if not isinstance(value, str) and offset in _KAFKA_NUMBERS:
        return _KAFKA_NUMBERS[offset]
    if offset < 0:
        raise ValidationError(f"option {option}: {offset} is out of range: offsets begin with {FIRST}")
    return offset


def _time(option: str, value: object) -> Bound:
    milliseconds = _whole(value)
    if milliseconds is not None:
        if not 0 <= milliseconds <= _MAX_MILLISECONDS:
            raise ValidationError(f"option {option}: {milliseconds} is out of range for milliseconds since 1970")
        return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=milliseconds)
    # A time of the year 1 or 9999 may lie outside of Python's times in UTC.
    with suppress(ValueError, OverflowError):
        time = datetime.fromisoformat(str(value))
        if time.tzinfo is not None:
            return time.astimezone(UTC)
    raise ValidationError(
        f"option {option}: {value!r} is not a time: write milliseconds since 1970, or 2026-01-31T12:00:00+00:00"
    )


def _whole(value: object) -> int | None:
    with suppress(ValueError):
        return int(value) if isinstance(value, str) or is_whole(value) else None
    return None


def is_whole(value: object) -> TypeGuard[int]:
    """Whether a JSON value is a whole number."""
    return isinstance(value, int) and not isinstance(value, bool)
