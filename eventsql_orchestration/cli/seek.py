"""`eventsql seek`: moving a consumer to another place in its topic's log."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any, Final, TypedDict, Unpack

import click

from eventsql_orchestration.cli.context import CliContext
from eventsql_orchestration.cli.output import say, write_json
from eventsql_orchestration.cli.parameters import (
    AsJson,
    ConsumerName,
    Partition,
    TopicName,
    Whole,
    command,
    executing,
    option,
)
from eventsql_orchestration.cli.tables import Columns, partition_of, same, show_items
from eventsql_orchestration.topics.positions import AtOffset, AtTime, Back, Earliest, Latest, Position, ShiftBy

if TYPE_CHECKING:
    from eventsql_orchestration.maintenance.seek import Move

_POSITIONS: Final[dict[str, Callable[[Any], Position]]] = {
    "to_earliest": lambda _: Earliest(), "to_latest": lambda _: Latest(), "to_offset": AtOffset,
    "to_datetime": AtTime, "by_duration": Back, "shift_by": ShiftBy,
}  # fmt: skip

_TIME: Final = "To the first event that entered the log at TIME or later; with its zone, such as 2026-05-01T12:00:00Z."
_BACK: Final = "To the first event that entered the log within this time before now: 15m, 2h, 7d, PT1H30M."


class _Places(TypedDict):
    to_earliest: Annotated[bool, option("To the oldest event.")]
    to_latest: Annotated[bool, option("Past the newest event.")]
    to_offset: Annotated[int | None, option("To the first event from offset N on.", type=Whole(min=0))]
    to_datetime: Annotated[datetime | None, option(_TIME)]
    by_duration: Annotated[timedelta | None, option(_BACK)]
    shift_by: Annotated[int | None, option("Over N events of each partition; backwards if N is negative: -100.")]


_JSON: Final[Columns] = {
    **same("partition"), "from": "offset", "to": "target", "consumed_again": "again", **same("skipped", "clamped"),
    "leased_by": "owner",
}  # fmt: skip


@command()
def seek(
    context: CliContext,
    *,
    topic: TopicName,
    consumer: ConsumerName,
    partition: Partition,
    execute: Annotated[bool, executing("Move it")],
    force: Annotated[bool, option("Move it even while it is leased. Its owner's batch is not committed.")],
    as_json: AsJson,
    **places: Unpack[_Places],
) -> None:
    """Move CONSUMER of TOPIC to another place in its log: a plan and, with --execute, the move.

    Exactly one option names the place. The plan counts the events that will be consumed again, and the events that will
    be skipped. All partitions move at once, and consuming continues there. A consumer with a leased partition moves
    with --force only.
    """
    position = _position(**places)
    with context.platform() as platform:
        if execute:
            moves = platform.seeker.execute(topic, consumer, position, partition=partition, force=force)
        else:
            moves = platform.seeker.plan(topic, consumer, position, partition=partition)
    if as_json:
        planned = [context.on_its_shard(move, _JSON) for move in moves]
        write_json({"topic": topic, "consumer": consumer, "executed": execute, "moves": planned})
    else:
        columns: Columns = {
            "shard": "shard", "partition": partition_of, "from": "offset", "to": "target",
            "consumed again": "again", "skipped": "skipped", "remark": _remark,
        }  # fmt: skip
        show_items(moves, columns)
    if execute:
        say(f"consumer {consumer!r} of topic {topic!r} moved")
    else:
        say("a plan, nothing has moved: run it again with --execute")


def _position(**places: Any) -> Position:
    given = [_POSITIONS[name](value) for name, value in places.items() if value is not None and value is not False]
    if len(given) != 1:
        options = [f"--{name.replace('_', '-')}" for name in _POSITIONS]
        raise click.UsageError(f"name the place by exactly one of {', '.join(options[:-1])} and {options[-1]}")
    return given[0]


def _remark(move: Move) -> str | None:
    clamped = ["the log ends there"] if move.clamped else []
    leased = [f"leased by {move.owner}"] if move.owner is not None else []
    return "; ".join(clamped + leased) or None
