"""The outcome of a registration: what was created or changed, in words for logs and the command line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from eventsql_orchestration.consumer import EVERY_EVENT, Consumer, ConsumerState
from eventsql_orchestration.model import Retention, Topic


@dataclass(frozen=True, slots=True)
class Registration:
    """A registration created `name`, or changed settings of it, each in words, or changed nothing.

    `outdated` is the part of the declaration that was true before, and was not applied.
    """

    name: str
    created: bool
    changes: tuple[str, ...] = ()
    outdated: str | None = None

    def __str__(self) -> str:
        if self.created:
            return f"{self.name} created"
        texts = [*self.changes, *filter(None, [self.outdated])]
        return f"{self.name} exists already{''.join(f'; {text}' for text in texts)}"


def topic_registration(before: Topic | None, after: Topic, declared: Topic) -> Registration:
    """The outcome for a topic, by its definitions before and after."""
    name = f"topic {after.name!r}"
    if before is None:
        return Registration(name, created=True)
    partitions = _change("partitions", [before.partitions], [after.partitions])
    retention = _change("retention", [_kept(before.retention)], [_kept(after.retention)])
    outdated = None
    if declared.partitions != after.partitions:
        outdated = (
            f"it has {after.partitions} partitions, because it was repartitioned, and is declared with its former "
            f"{declared.partitions}: declare {after.partitions}"
        )
    return Registration(name, created=False, changes=(*partitions, *retention), outdated=outdated)


def consumer_registration(
    consumer: Consumer, before: Sequence[ConsumerState], after: Sequence[ConsumerState]
) -> Registration:
    """The outcome for a consumer, by its partitions before and after."""
    name = f"consumer {consumer.name!r} of topic {consumer.topic!r}"
    if not before:
        return Registration(name, created=True)
    attempts = _change("max attempts", [each.max_attempts for each in before], [each.max_attempts for each in after])
    filters = _change("filter", map(_filtered, before), map(_filtered, after))
    return Registration(name, created=False, changes=(*attempts, *filters))


def merged(of_shards: Sequence[Registration]) -> Registration:
    """The outcome over shards: created where it is new on all of them, and every change once."""
    changes = dict.fromkeys(change for each in of_shards for change in each.changes)
    outdated = next((each.outdated for each in of_shards if each.outdated), None)
    return Registration(of_shards[0].name, all(each.created for each in of_shards), tuple(changes), outdated)


def _change(setting: str, before: Iterable[object], after: Iterable[object]) -> list[str]:
    """The change of a setting, which has a value for each partition: none or one."""
    was, now = (" and ".join(sorted({str(value) for value in values})) for values in (before, after))
    return [] if was == now else [f"{setting}: {now} (was {was})"]


def _filtered(state: ConsumerState) -> object:
    return state.filter or EVERY_EVENT


def _kept(retention: Retention | None) -> str:
    if retention is None or retention.for_ever:
        return "for ever"
    bounds = {"s": retention.seconds, "bytes": retention.bytes, "events": retention.events}
    return ", ".join(f"{bound:g} {unit}" for unit, bound in bounds.items() if bound is not None)
