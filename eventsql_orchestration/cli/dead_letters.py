"""`eventsql dlt`: what consumers have given up, and giving it to them again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Final, TypeVar

import click

from eventsql_orchestration.cli.context import CliContext, pass_context
from eventsql_orchestration.cli.output import (
    counted,
    event_object,
    partition_name,
    say,
    show_fields,
    show_table,
    write,
    write_json,
)
from eventsql_orchestration.cli.parameters import ConsumerName, NameValue, Time, json_option, topic_argument
from eventsql_orchestration.log import dead_letters
from eventsql_orchestration.log.dead_letters import DeadLetter, LetterFilter
from eventsql_orchestration.platform import EventSQL

Command = TypeVar("Command", bound=Callable[..., object])

_OFFSET: Final = click.IntRange(min=1)

_FILTER: Final = (
    click.option("--consumer", type=ConsumerName(), metavar="NAME", help="Those that this consumer gave up."),
    click.option(
        "--backfill", metavar="ID", help="Those of this backfill, which are left out otherwise, but for those of --id."
    ),
    click.option("--exception", metavar="TYPE", help="Those of this type of exception, such as ValueError."),
    click.option("--key", metavar="KEY", help="Those with this key."),
    click.option(
        "--metadata", type=NameValue(), multiple=True, metavar="NAME=VALUE", help="Those with this metadata; repeat it."
    ),
    click.option("--id", "ids", type=_OFFSET, multiple=True, metavar="OFFSET", help="This one; repeat it."),
    click.option("--from", "first", type=_OFFSET, metavar="OFFSET", help="Those at this offset and after it."),
    click.option("--to", "last", type=_OFFSET, metavar="OFFSET", help="Those up to this offset."),
    click.option(
        "--since",
        type=Time(),
        metavar="TIME",
        help="Those given up at this time or later, such as 2026-05-01T12:00:00Z.",
    ),
    click.option("--until", type=Time(), metavar="TIME", help="Those given up before this time."),
)


def filter_options(command: Command) -> Command:
    """The options that say which dead letters are meant, as `_letters` takes them."""
    for option in reversed(_FILTER):
        command = option(command)
    return command


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

    TOPIC is the topic that they come from; they lie in TOPIC_dlt, and OFFSET is their place there.
    """


@dlt.command("list")
@topic_argument
@filter_options
@click.option("--redriven/--not-redriven", default=None, help="Those that were redriven, or were not. Without: both.")
@click.option(
    "--limit", type=click.IntRange(min=1), default=100, show_default=True, metavar="N", help="The oldest N of them."
)
@json_option
@pass_context
def list_dead_letters(
    context: CliContext, /, *, topic: str, redriven: bool | None, limit: int, as_json: bool, **conditions: Any
) -> None:
    """List the dead letters of TOPIC. Those of a backfill are listed apart, with --backfill."""
    wanted = _letters(**conditions)
    with context.platform() as platform:
        letters = platform.dead_letters.list(topic, wanted, limit=limit, redriven=redriven)
        _tell_of_backfills(platform, topic, wanted)
    if as_json:
        write_json([_object(context, letter) for letter in letters])
        return
    several = any(letter.shard is not None for letter in letters)
    show_table(
        [
            *(["shard"] if several else []), "offset", "event", "partition", "key", "consumer", "attempts", "exception",
            "message", "given up (UTC)", "redriven (UTC)",
        ],
        [
            (
                *([letter.shard] if several else []),
                letter.id,
                letter.metadata.get(dead_letters.SOURCE_OFFSET),
                _source_partition(letter),
                letter.key,
                letter.consumer,
                letter.metadata.get(dead_letters.ATTEMPTS),
                letter.metadata.get(dead_letters.EXCEPTION),
                letter.metadata.get(dead_letters.MESSAGE),
                letter.buffered_at,
                letter.redriven_at,
            )
            for letter in letters
        ],
    )  # fmt: skip


def _tell_of_backfills(platform: EventSQL, topic: str, wanted: LetterFilter) -> None:
    """Say which letters are left out because they are of backfills."""
    if wanted.backfill is not None or wanted.ids is not None:
        return
    for backfill, letters in platform.dead_letters.of_backfills(topic).items():
        say(
            f"{counted(letters, 'dead letter')} of backfill {backfill} left out: `eventsql dlt list {topic} --backfill "
            f"{backfill}` lists them"
        )


def _source_partition(letter: DeadLetter) -> str:
    partition = str(letter.metadata.get(dead_letters.SOURCE_PARTITION, "-"))
    try:
        return partition_name(int(partition))
    except ValueError:
        # A letter that a factory made, or another program.
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
    """Show the dead letter of TOPIC at OFFSET with its value, as hexadecimal digits where it is not UTF-8 text."""
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
@filter_options
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="The oldest N that were not redriven yet.")
@click.option("--again", is_flag=True, help="Also those that were redriven before.")
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

    All of them, or those that meet every option that is given. What was redriven before is left out unless --again is
    given, whichever options it was redriven with.

    The letters of a backfill are left out too: every consumer of TOPIC gets what is published again, and other
    consumers had no fault with these events. --backfill ID or --id publishes them all the same. To hand them to the
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
