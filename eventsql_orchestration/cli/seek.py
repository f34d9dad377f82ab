"""`eventsql seek`: moving a consumer to another place in its topic's log."""

from __future__ import annotations

from datetime import datetime, timedelta

import click

from eventsql_orchestration.cli.context import CliContext, pass_context
from eventsql_orchestration.cli.output import partition_name, say, show_table, write_json
from eventsql_orchestration.cli.parameters import (
    Duration,
    Time,
    consumer_argument,
    json_option,
    partition_option,
    topic_argument,
)
from eventsql_orchestration.log.positions import AtOffset, AtTime, Back, Earliest, Latest, Position, ShiftBy
from eventsql_orchestration.log.seek import Move


@click.command(short_help="Move a consumer to another place in its topic's log.")
@topic_argument
@consumer_argument
@click.option("--to-earliest", is_flag=True, help="To the oldest event.")
@click.option("--to-latest", is_flag=True, help="To what comes from now on.")
@click.option("--to-offset", type=click.IntRange(min=0), metavar="N", help="To the first event from offset N on.")
@click.option(
    "--to-datetime",
    type=Time(),
    metavar="TIME",
    help="To the first event that entered the log at TIME or later; with its zone, such as 2026-05-01T12:00:00Z.",
)
@click.option("--by-duration", type=Duration(), metavar="DURATION", help="The same, so long ago: 15m, 2h, 7d, PT1H30M.")
@click.option(
    "--shift-by", type=int, metavar="N", help="Over N events of each partition; back where N is negative, as in -100."
)
@partition_option
@click.option("--execute", is_flag=True, help="Move it; without this, the plan is shown and nothing is changed.")
@click.option("--force", is_flag=True, help="Move it even while it is leased: what its owner is at is not committed.")
@json_option
@pass_context
def seek(
    context: CliContext,
    *,
    topic: str,
    consumer: str,
    to_earliest: bool,
    to_latest: bool,
    to_offset: int | None,
    to_datetime: datetime | None,
    by_duration: timedelta | None,
    shift_by: int | None,
    partition: int | None,
    execute: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Move CONSUMER of TOPIC to another place in its log: a plan and, with --execute, the move.

    Exactly one option says where to. The plan counts the events that will be consumed again, and those that never will
    be. All partitions move at once; consumptions go on from there. While somebody leases a partition the consumer is
    moved by --force only.
    """
    position = _position(
        [
            Earliest() if to_earliest else None,
            Latest() if to_latest else None,
            None if to_offset is None else AtOffset(to_offset),
            None if to_datetime is None else AtTime(to_datetime),
            None if by_duration is None else Back(by_duration),
            None if shift_by is None else ShiftBy(shift_by),
        ]
    )
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
                "moves": [{**context.on_shard(move.shard), **_object(move)} for move in moves],
            }
        )
    else:
        several = any(move.shard is not None for move in moves)
        show_table(
            [*(["shard"] if several else []), "partition", "from", "to", "consumed again", "skipped", "remark"],
            [
                (
                    *([move.shard] if several else []),
                    partition_name(move.partition),
                    move.offset,
                    move.target,
                    move.again,
                    move.skipped,
                    _remark(move),
                )
                for move in moves
            ],
        )
    if execute:
        say(f"consumer {consumer!r} of topic {topic!r} moved")
    else:
        say("a plan, nothing has moved: run it again with --execute")


def _position(given: list[Position | None]) -> Position:
    positions = [position for position in given if position is not None]
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


def _object(move: Move) -> dict[str, object]:
    return {
        "partition": move.partition,
        "from": move.offset,
        "to": move.target,
        "consumed_again": move.again,
        "skipped": move.skipped,
        "clamped": move.clamped,
        "leased_by": move.owner,
    }
