"""`eventsql seek`: moving a consumer to another place in its topic's log."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import click

from eventsql_orchestration.cli.context import CliContext, pass_context
from eventsql_orchestration.cli.output import Column, partition_of, say, show_items, write_json
from eventsql_orchestration.cli.parameters import (
    Duration,
    Time,
    consumer_argument,
    json_option,
    partition_option,
    topic_argument,
)
from eventsql_orchestration.maintenance.seek import Move
from eventsql_orchestration.topics.offsets import AtOffset, AtTime, Back, Earliest, Latest, Position, ShiftBy

_POSITIONS: Final[dict[str, Callable[[Any], Position]]] = {
    "to_earliest": lambda _: Earliest(),
    "to_latest": lambda _: Latest(),
    "to_offset": AtOffset,
    "to_datetime": AtTime,
    "by_duration": Back,
    "shift_by": ShiftBy,
}

_JSON: Final[dict[str, Column]] = {
    "partition": "partition",
    "from": "offset",
    "to": "target",
    "consumed_again": "again",
    "skipped": "skipped",
    "clamped": "clamped",
    "leased_by": "owner",
}


@click.command(short_help="Move a consumer to another place in its topic's log.")
@topic_argument
@consumer_argument
@click.option("--to-earliest", is_flag=True, help="To the oldest event.")
@click.option("--to-latest", is_flag=True, help="Past the newest event.")
@click.option("--to-offset", type=click.IntRange(min=0), metavar="N", help="To the first event from offset N on.")
@click.option(
    "--to-datetime",
    type=Time(),
    metavar="TIME",
    help="To the first event that entered the log at TIME or later; with its zone, such as 2026-05-01T12:00:00Z.",
)
@click.option(
    "--by-duration",
    type=Duration(),
    metavar="DURATION",
    help="The same, a duration before now: 15m, 2h, 7d, PT1H30M.",
)
@click.option(
    "--shift-by", type=int, metavar="N", help="Over N events of each partition, backwards if N is negative: -100."
)
@partition_option
@click.option("--execute", is_flag=True, help="Move it; without this, the plan is shown and nothing is changed.")
@click.option("--force", is_flag=True, help="Move it even while it is leased. Its owner's batch is not committed.")
@json_option
@pass_context
def seek(
    context: CliContext,
    /,
    *,
    topic: str,
    consumer: str,
    partition: int | None,
    execute: bool,
    force: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Move CONSUMER of TOPIC to another place in its log: a plan and, with --execute, the move.

    Exactly one option names the place. The plan counts the events that will be consumed again, and the events that will
    be skipped. All partitions move at once, and consuming continues there. A consumer with a leased partition moves
    with --force only.
    """
    position = _position(given)
    with context.platform() as platform:
        if execute:
            moves = platform.seeker.execute(topic, consumer, position, partition=partition, force=force)
        else:
            moves = platform.seeker.plan(topic, consumer, position, partition=partition)
    if as_json:
        write_json(
            {
                "topic": topic,
                "consumer": consumer,
                "executed": execute,
                "moves": [context.on_its_shard(move, _JSON) for move in moves],
            }
        )
    else:
        show_items(
            moves,
            {
                "shard": "shard",
                "partition": partition_of,
                "from": "offset",
                "to": "target",
                "consumed again": "again",
                "skipped": "skipped",
                "remark": _remark,
            },
        )
    if execute:
        say(f"consumer {consumer!r} of topic {topic!r} moved")
    else:
        say("a plan, nothing has moved: run it again with --execute")


def _position(given: dict[str, Any]) -> Position:
    positions = [_POSITIONS[name](value) for name, value in given.items() if value is not None and value is not False]
    if len(positions) != 1:
        raise click.UsageError(
            "say where to with exactly one of --to-earliest, --to-latest, --to-offset, --to-datetime, --by-duration "
            "and --shift-by"
        )
    return positions[0]


def _remark(move: Move) -> str | None:
    remarks = []
    if move.clamped:
        remarks.append("the log ends there")
    if move.owner is not None:
        remarks.append(f"leased by {move.owner}")
    return "; ".join(remarks) or None
