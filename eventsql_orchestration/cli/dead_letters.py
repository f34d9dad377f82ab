"""`eventsql dlt`: list, show and redrive the events that consumers have given up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Final

import click

from eventsql_orchestration.cli.context import CliContext, pass_context
from eventsql_orchestration.cli.output import (
    counted,
    event_object,
    partition_name,
    say,
    show_fields,
    show_items,
    write,
    write_json,
)
from eventsql_orchestration.cli.parameters import ConsumerName, NameValue, Time, json_option, options, topic_argument
from eventsql_orchestration.client.eventsql import EventSQL
from eventsql_orchestration.consuming import dead_letter_values
from eventsql_orchestration.consuming.dead_letters import DeadLetter, LetterFilter

_OFFSET: Final = click.IntRange(min=1)

_filter_options: Final = options(
    click.option("--consumer", type=ConsumerName(), metavar="NAME", help="Dead letters of this consumer."),
    click.option(
        "--backfill",
        metavar="ID",
        help="Dead letters of this backfill; without it or --id, they are left out.",
    ),
    click.option("--exception", metavar="TYPE", help="Dead letters with this type of exception, such as ValueError."),
    click.option("--key", metavar="KEY", help="Dead letters with this key."),
    click.option(
        "--metadata", type=NameValue(), multiple=True, metavar="NAME=VALUE", help="With this metadata; repeat it."
    ),
    click.option("--id", "ids", type=_OFFSET, multiple=True, metavar="OFFSET", help="At this offset; repeat it."),
    click.option("--from", "first", type=_OFFSET, metavar="OFFSET", help="At this offset and after it."),
    click.option("--to", "last", type=_OFFSET, metavar="OFFSET", help="Up to this offset."),
    click.option("--since", type=Time(), metavar="TIME", help="Given up at 2026-05-01T12:00:00Z or later."),
    click.option("--until", type=Time(), metavar="TIME", help="Given up before this time."),
)
"""The options that choose dead letters, as `_letters` takes them."""


def _letters(
    *,
    metadata: tuple[tuple[str, str], ...],
    ids: tuple[int, ...],
    first: int | None,
    last: int | None,
    **conditions: Any,
) -> LetterFilter:
    return LetterFilter(
        metadata=dict(metadata), ids=ids or None, after=0 if first is None else first - 1, upto=last, **conditions
    )


@click.group()
def dlt() -> None:
    """List, show and redrive dead letters.

    TOPIC is the topic of the original events. The dead letters are in TOPIC_dlt, and OFFSET is an offset there.
    """


@dlt.command("list")
@topic_argument
@_filter_options
@click.option("--redriven/--not-redriven", default=None, help="Only redriven ones, or only others  [default: both].")
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=100,
    show_default=True,
    metavar="N",
    help="List the oldest N.",
)
@json_option
@pass_context
def list_dead_letters(
    context: CliContext, /, *, topic: str, redriven: bool | None, limit: int, as_json: bool, **conditions: Any
) -> None:
    """List the dead letters of TOPIC. --backfill lists the dead letters of a backfill instead."""
    wanted = _letters(**conditions)
    with context.platform() as platform:
        letters = platform.dead_letters.list(topic, wanted, limit=limit, redriven=redriven)
        _tell_of_backfills(platform, topic, wanted)
    if as_json:
        write_json([_object(context, letter) for letter in letters])
        return
    show_items(
        letters,
        {
            "shard": "shard",
            "offset": "id",
            "event": _metadata(dead_letter_values.SOURCE_OFFSET),
            "partition": _source_partition,
            "key": "key",
            "consumer": "consumer",
            "attempts": _metadata(dead_letter_values.ATTEMPTS),
            "exception": _metadata(dead_letter_values.EXCEPTION),
            "message": _metadata(dead_letter_values.MESSAGE),
            "given up (UTC)": "buffered_at",
            "redriven (UTC)": "redriven_at",
        },
    )


def _metadata(name: str) -> Callable[[DeadLetter], object]:
    return lambda letter: letter.metadata.get(name)


def _tell_of_backfills(platform: EventSQL, topic: str, wanted: LetterFilter) -> None:
    """Say which letters are left out because they belong to backfills."""
    if wanted.backfill is not None or wanted.ids is not None:
        return
    for backfill, letters in platform.dead_letters.of_backfills(topic).items():
        say(
            f"{counted(letters, 'dead letter')} of backfill {backfill} left out: `eventsql dlt list {topic} --backfill "
            f"{backfill}` lists them"
        )


def _source_partition(letter: DeadLetter) -> str:
    partition = str(letter.metadata.get(dead_letter_values.SOURCE_PARTITION, "-"))
    try:
        return partition_name(int(partition))
    except ValueError:
        # A factory or another program made the letter.
        return partition


def _object(context: CliContext, letter: DeadLetter) -> dict[str, Any]:
    return {
        **event_object(letter, shard=letter.shard or context.shard),
        "origin": letter.origin,
        "redriven": letter.redriven_at is not None,
        "redriven_at": letter.redriven_at,
    }


@dlt.command()
@topic_argument
@click.argument("offset", type=_OFFSET)
@json_option
@pass_context
def show(context: CliContext, *, topic: str, offset: int, as_json: bool) -> None:
    """Show the dead letter of TOPIC at OFFSET with its value: hexadecimal digits if it is not UTF-8 text."""
    with context.platform() as platform:
        letter = platform.dead_letters.show(topic, offset)
    if as_json:
        write_json(_object(context, letter))
        return
    try:
        value, form = letter.value.decode(), "as text"
    except UnicodeDecodeError:
        value, form = letter.value.hex(), "in hexadecimal"
    show_fields(
        {
            "topic": letter.topic,
            "offset": letter.id,
            "partition": partition_name(letter.partition),
            "key": letter.key,
            "event": letter.origin,
            "given up (UTC)": letter.buffered_at,
            "in the log (UTC)": letter.created_at,
            "redriven (UTC)": letter.redriven_at,
        }
    )
    if letter.metadata:
        write("\n")
        show_fields(letter.metadata)
    write(f"\n{counted(len(letter.value), 'byte')} {form}:\n\n{value}\n")


@dlt.command()
@topic_argument
@_filter_options
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="The oldest N that were not redriven yet.")
@click.option("--again", is_flag=True, help="Also dead letters that were redriven before.")
@click.option("--dry-run", is_flag=True, help="Only say how many it would be.")
@json_option
@pass_context
def redrive(
    context: CliContext,
    /,
    *,
    topic: str,
    limit: int | None,
    again: bool,
    dry_run: bool,
    as_json: bool,
    **conditions: Any,
) -> None:
    """Publish the dead letters of TOPIC to it again, each once and in order.

    With options, only the dead letters that meet all of them. Dead letters that were redriven before are left out
    without --again.

    The dead letters of a backfill are left out too: every consumer of TOPIC gets the events that are published again,
    and other consumers had handled these events. --backfill ID or --id publishes them all the same. To hand them to the
    backfill's consumer alone, replay their offsets: `eventsql backfill TOPIC CONSUMER --from OFFSET --to OFFSET`.
    """
    wanted = _letters(**conditions)
    with context.platform(transfer=not dry_run) as platform:
        if (source := platform.dead_letters.topic_of(topic)) is not None:
            # A letter that was given up a moment ago may still wait in the buffer.
            platform.transfer.run_once([source])
        _tell_of_backfills(platform, topic, wanted)
        if dry_run:
            plan = platform.dead_letters.plan_redrive(topic, wanted, limit=limit, again=again)
            if as_json:
                write_json(asdict(plan))
            else:
                show_fields(
                    {
                        "dead letters": plan.letters,
                        "redriven before": plan.redriven_before,
                        "would be published again": plan.redrives,
                    }
                )
            return
        redriven = platform.dead_letters.redrive(topic, wanted, limit=limit, again=again)
    if as_json:
        write_json({"redriven": redriven})
    say(f"{counted(redriven, 'dead letter')} of topic {topic!r} published again")
