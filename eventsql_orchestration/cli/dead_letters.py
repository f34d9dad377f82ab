"""`eventsql dlt`: what consumers have given up, and giving it to them again."""

from __future__ import annotations

from typing import Any

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
from eventsql_orchestration.cli.parameters import json_option, topic_argument
from eventsql_orchestration.errors import EventSQLError
from eventsql_orchestration.log import dead_letters
from eventsql_orchestration.model import DEAD_LETTER_SUFFIX, Event
from eventsql_orchestration.platform import EventSQL


@click.group()
def dlt() -> None:
    """List, show and redrive dead letters.

    TOPIC is the topic that they come from; they lie in TOPIC_dlt.
    """


@dlt.command("list")
@topic_argument
@click.option(
    "--limit", type=click.IntRange(min=1), default=100, show_default=True, metavar="N", help="The oldest N of them."
)
@json_option
@pass_context
def list_dead_letters(context: CliContext, *, topic: str, limit: int, as_json: bool) -> None:
    """List the dead letters of TOPIC."""
    with context.platform() as platform:
        platform.registry.topic(topic)
        letters = platform.dead_letters.list(topic, limit=limit)
        redriven = _redriven_upto(platform, topic)
    if as_json:
        write_json([_object(letter, redriven) for letter in letters])
        return
    show_table(
        ["offset", "event", "partition", "consumer", "attempts", "exception", "message", "given up (UTC)", "redriven"],
        [
            (
                letter.id,
                letter.metadata.get(dead_letters.SOURCE_OFFSET),
                _source_partition(letter),
                letter.metadata.get(dead_letters.CONSUMER),
                letter.metadata.get(dead_letters.ATTEMPTS),
                letter.metadata.get(dead_letters.EXCEPTION),
                letter.metadata.get(dead_letters.MESSAGE),
                letter.buffered_at,
                letter.id <= redriven,
            )
            for letter in letters
        ],
    )


def _source_partition(letter: Event) -> str:
    partition = letter.metadata.get(dead_letters.SOURCE_PARTITION)
    return "-" if partition is None else partition_name(int(partition))


def _redriven_upto(platform: EventSQL, topic: str) -> int:
    """The offset up to which dead letters were redriven."""
    states = platform.registry.consumers(topic + DEAD_LETTER_SUFFIX)
    return max((state.last_event_id for state in states if state.name == dead_letters.REDRIVE_CONSUMER), default=0)


def _object(letter: Event, redriven: int) -> dict[str, Any]:
    return {**event_object(letter), "redriven": letter.id <= redriven}


@dlt.command()
@topic_argument
@click.argument("offset", type=click.IntRange(min=1))
@json_option
@pass_context
def show(context: CliContext, *, topic: str, offset: int, as_json: bool) -> None:
    """Show the dead letter of TOPIC at OFFSET, as `dlt list` numbers them, with its value."""
    with context.platform() as platform:
        platform.registry.topic(topic)
        source = topic + DEAD_LETTER_SUFFIX
        found = platform.reader.read(source, after=offset - 1, upto=offset)
        redriven = _redriven_upto(platform, topic)
    if not found:
        raise EventSQLError(
            f"topic {source!r} has no event at offset {offset}: list them with `eventsql dlt list {topic}`"
        )
    letter = _object(found[0], redriven)
    if as_json:
        write_json(letter)
        return
    value, metadata = letter.pop("value"), letter.pop("metadata")
    show_fields({**letter, **metadata})
    write(f"\n{value}\n")


@dlt.command()
@topic_argument
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="The oldest N that were not redriven yet.")
@pass_context
def redrive(context: CliContext, *, topic: str, limit: int | None) -> None:
    """Publish the dead letters of TOPIC to it again, each once and in order."""
    with context.platform(transfer=True) as platform:
        platform.registry.topic(topic)
        source = platform.registry.topic(topic + DEAD_LETTER_SUFFIX).name
        # A letter that was given up a moment ago may still wait in the buffer.
        platform.transfer.run_once([source])
        redriven = platform.dead_letters.redrive(topic, limit=limit)
    say(f"{counted(redriven, 'dead letter')} of topic {topic!r} published again")
