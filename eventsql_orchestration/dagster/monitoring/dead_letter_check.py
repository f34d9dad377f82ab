"""The check `delivered` of a consumer: red while a dead letter is open, or an event blocks a partition."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

import dagster as dg

from eventsql_orchestration import NOT_PARTITIONED, Shard
from eventsql_orchestration.consumer import ConsumerState
from eventsql_orchestration.consuming import dead_letter_values
from eventsql_orchestration.consuming.dead_letters import DeadLetter, LetterFilter
from eventsql_orchestration.dagster.consumers.asset_lag import AssetLag
from eventsql_orchestration.dagster.consumers.definition import ConsumerDefinition
from eventsql_orchestration.dagster.monitoring.checks import (
    ConsumerCheck,
    Look,
    Memory,
    Verdict,
    unregistered,
    verbatim,
)
from eventsql_orchestration.dagster.topics import topic_key
from eventsql_orchestration.errors import ConsumerNotFoundError, DatabaseBusyError, DatabaseUnavailableError
from eventsql_orchestration.model import how_often
from eventsql_orchestration.orchestration.shards import command, partition_label, place, shards_of
from eventsql_orchestration.validation import advised

DELIVERED_CHECK: Final = "delivered"

OPEN_LETTERS: Final = "open dead letters"
BLOCKED_PARTITIONS: Final = "blocked partitions"

LETTERS_SHOWN: Final = 10
"""Maximum number of dead letters that a check names. It names the oldest; each tick of the sensor reads their
values."""

NO_PARTITION: Final = str(NOT_PARTITIONED)

_NONE_BEFORE: Final = "no open letter up to"
_TOPIC_MADE: Final = "of the topic created at"
_UNSETTLED: Final = "not all was delivered"
"""In the memory of a shard: whether it had open dead letters or blocked partitions when it was last reached."""


def build_delivered_check(
    consumer: ConsumerDefinition, *, severity: dg.AssetCheckSeverity = dg.AssetCheckSeverity.ERROR
) -> ConsumerCheck:
    """A check `delivered` of a consumer's asset: red while a dead letter is open, or an event blocks a partition.

    It is red while `<topic>_dlt` holds an open dead letter of the consumer, and while a failed event blocks one of its
    partitions. A letter is open until it is redriven, dismissed or erased. The result names the events with their
    errors, and the commands that show, redrive and dismiss them. A database that does not answer in time counts with
    its last known state.
    """
    description = f"Consumer {consumer.consumer.name} has no open dead letter, and no event blocks it."
    key = dg.AssetCheckKey(consumer.key, DELIVERED_CHECK)
    return ConsumerCheck(key, severity, description, _DeliveredRule(consumer), consumer)


@dataclass(slots=True)
class _Found:
    """Open dead letters and blocked partitions, and the memory for the next evaluation."""

    letters: list[DeadLetter]
    blocked: list[tuple[ConsumerState, str]]
    memory: dict[str, Any]

    def __bool__(self) -> bool:
        return bool(self.letters or self.blocked)


@dataclass(frozen=True, slots=True)
class _DeliveredRule:
    consumer: ConsumerDefinition

    def __call__(self, look: Look[AssetLag]) -> Verdict:
        if not look.state.registered:
            return unregistered(self.consumer, look)
        shards = shards_of(look.platform)
        found, silent = _Found([], [], {}), []
        for shard in shards:
            here = None
            # A shard that is down may have no name.
            if len(shards) == 1 or (shard.name is not None and shard.name not in look.state.unreachable):
                with suppress(DatabaseUnavailableError, DatabaseBusyError):
                    here = self._look(shard, look.memory.get(shard.label, {}))
            if here is None:
                silent.append(shard.label)
                continue
            for letter in here.letters:
                letter.shard = shard.name
            found.letters += here.letters
            found.blocked += [(replace(state, shard=shard.name), reason) for state, reason in here.blocked]
            found.memory[shard.label] = {**here.memory, _UNSETTLED: bool(here)}

        left = {name: before for name, before in look.memory.items() if silent and name not in found.memory}
        doubtful = any(isinstance(before, Mapping) and before.get(_UNSETTLED) for before in left.values())
        found.memory |= left
        found.letters.sort(key=lambda letter: letter.buffered_at)
        return self._verdict(found, silent, doubtful=doubtful)

    def _look(self, shard: Shard, memory: Memory) -> _Found:
        topic, name = self.consumer.topic.name, self.consumer.consumer.name
        letters, memory = _open_letters(shard, memory, topic, name)
        try:
            states = shard.registry.consumer(topic, name)
        except ConsumerNotFoundError:
            # The consumer is registered on other shards only, and its sensor says so.
            states = []
        blocked = [(s, reason) for s in states if (reason := shard.dead_letters.blocking(s)) is not None]
        return _Found(letters, blocked, dict(memory))

    def _verdict(self, found: _Found, silent: Sequence[str], *, doubtful: bool) -> Verdict:
        topic, name = self.consumer.topic.name, self.consumer.consumer.name
        letters, blocked = found.letters[: LETTERS_SHOWN + 1], found.blocked
        metadata: dict[str, Any] = {OPEN_LETTERS: min(len(letters), LETTERS_SHOWN), BLOCKED_PARTITIONS: len(blocked)}
        unknown = f"no answer in time from {', '.join(silent)}"
        if doubtful:
            unknown += ", which had undelivered events when it was last reached"
        if not found and not doubtful:
            description = "every event was delivered" + (f", as far as is known: {unknown}" if silent else "")
            return Verdict(True, description, metadata, " ".join(["delivered", *silent]), found.memory)

        reasons = [_blocked(state, reason) for state, reason in blocked]
        if blocked:
            metadata["resume"] = advised("consumer resume", topic, name)
        if letters:
            reasons.append(_given_up(letters))
            metadata |= _letters_metadata(topic, name, letters[:LETTERS_SHOWN])
        if silent:
            reasons.append(unknown)
        ids = [letter.id if letter.shard is None else place(letter.shard, letter.id) for letter in letters]
        stops = [
            (s.partition if s.shard is None else place(s.shard, s.partition), s.failed_event_id) for s, _ in blocked
        ]
        return Verdict(False, "; ".join(reasons), metadata, " ".join([str(ids), str(stops), *silent]), found.memory)


def _open_letters(
    shard: Shard, memory: Memory, topic: str, consumer: str
) -> tuple[list[DeadLetter], Mapping[str, Any]]:
    """The oldest open dead letters, one more than the check shows, and the memory: up to its offset, none is open.

    A letter that was redriven, dismissed or erased is never open again, so the search starts at the first letter that
    was open. Searching 300,000 letters for the letters of one consumer would take hundreds of milliseconds at each
    tick.
    """
    source = shard.dead_letters.topic_of(topic)
    if source is None:
        return [], {}
    made = str(shard.registry.topic(source).created_at)
    end = shard.reader.end(source)
    # The log ends earlier than before if a standby that lacked its newest letters was promoted.
    after = min(int(memory.get(_NONE_BEFORE, 0)), end) if memory.get(_TOPIC_MADE) == made else 0
    letters = shard.dead_letters.list(
        topic, LetterFilter(consumer=consumer, after=after), limit=LETTERS_SHOWN + 1, redriven=False
    )
    # Letters that arrived after `end` was read are found next time.
    return letters, {_NONE_BEFORE: letters[0].id - 1 if letters else end, _TOPIC_MADE: made}


def _on(shard: str | None) -> str:
    return "" if shard is None else f" on shard {shard}"


def _given_up(letters: list[DeadLetter]) -> str:
    first = letters[0]
    if len(letters) == 1:
        return f"1 dead letter is open: {_named(first)}"
    count = f"more than {LETTERS_SHOWN}" if len(letters) > LETTERS_SHOWN else str(len(letters))
    return f"{count} dead letters are open, the oldest: {_named(first)}"


def _named(letter: DeadLetter) -> str:
    # Another publisher may have written any text into a letter.
    attempts = str(letter.metadata.get(dead_letter_values.ATTEMPTS))
    often = how_often(attempts if attempts.isdecimal() else "some")
    event = "an event of unknown origin"
    if letter.origin is not None:
        topic, partition, offset = letter.origin.rsplit(":", 2)
        where = topic if partition == NO_PARTITION else f"{topic}[{partition}]"
        event = f"event {verbatim(offset)} of topic {verbatim(where)}"
    return f"{event}{_on(letter.shard)} failed {often} ({verbatim(_error(letter))})"


def _partition(letter: DeadLetter) -> str:
    partition = str(letter.metadata.get(dead_letter_values.SOURCE_PARTITION, ""))
    return "all" if partition == NO_PARTITION else partition


def _error(letter: DeadLetter) -> str:
    return f"{letter.metadata.get(dead_letter_values.EXCEPTION)}: {letter.metadata.get(dead_letter_values.MESSAGE)}"


def _blocked(state: ConsumerState, reason: str) -> str:
    where = f"{partition_label(state.topic, state.partition)}{_on(state.shard)}"
    return (
        f"{where} is blocked by event {state.failed_event_id}, which failed "
        f"{how_often(state.attempts)} ({verbatim(str(state.failure))}), and {reason}"
    )


def _letters_metadata(topic: str, consumer: str, letters: list[DeadLetter]) -> dict[str, Any]:
    def record(letter: DeadLetter) -> dg.TableRecord:
        return dg.TableRecord(
            {
                "topic": str(letter.metadata.get(dead_letter_values.SOURCE_TOPIC, topic)),
                "partition": _partition(letter),
                "offset": str(letter.metadata.get(dead_letter_values.SOURCE_OFFSET, "")),
                "attempts": str(letter.metadata.get(dead_letter_values.ATTEMPTS, "")),
                "error": _error(letter),
                "given up at": letter.buffered_at.isoformat(timespec="seconds"),
                "show": show(letter),
                **({} if letter.shard is None else {"shard": letter.shard}),
            }
        )

    def show(letter: DeadLetter) -> str:
        return command(letter.shard, f"dlt show {topic} {letter.id}")

    return {
        "dead letters": dg.MetadataValue.table([record(letter) for letter in letters]),
        "show": show(letters[0]),
        "redrive": f"eventsql dlt redrive {topic} --consumer {shlex.quote(consumer)} --execute",
        "dismiss": f"eventsql dlt dismiss {topic} --consumer {shlex.quote(consumer)} --execute",
        "dead letter topic": dg.MetadataValue.asset(topic_key(letters[0].topic)),
    }
