"""`eventsql dlt`: list, show, redrive and dismiss the events that consumers have given up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final, TypedDict, Unpack

import click

from eventsql_orchestration.cli.context import CliContext
from eventsql_orchestration.cli.output import event_object, harmless, say, say_plan, write, write_json
from eventsql_orchestration.cli.parameters import (
    CONSUMER,
    MOMENT,
    POSITIVE,
    AsJson,
    TopicName,
    argument,
    command,
    executing,
    option,
)
from eventsql_orchestration.cli.tables import (
    Columns,
    partition_name,
    partition_of,
    picked,
    same,
    show_fields,
    show_list,
)
from eventsql_orchestration.consuming import dead_letter_values
from eventsql_orchestration.consuming.dead_letter_values import DeadLetter, LetterFilter
from eventsql_orchestration.topics.side_consumers import backfill_of
from eventsql_orchestration.validation import counted

if TYPE_CHECKING:
    from eventsql_orchestration.client.eventsql import EventSQL

_OFFSET: Final[dict[str, Any]] = {"type": POSITIVE, "metavar": "OFFSET"}

_BACKFILL: Final = "Dead letters of this backfill. Without this option, dead letters of backfills are left out."


_SINCE: Final = "Given up at this time or later (2026-05-01T12:00:00Z), or within a duration before now (2h, 7d)."


class _Filter(TypedDict):
    """The options that choose dead letters."""

    consumer: Annotated[str | None, option("Dead letters of this consumer.", type=CONSUMER, metavar="NAME")]
    backfill: Annotated[str | None, option(_BACKFILL, metavar="ID")]
    exception: Annotated[str | None, option("With this type of exception, such as ValueError.", metavar="TYPE")]
    key: Annotated[str | None, option("With this key.", metavar="KEY")]
    metadata: Annotated[tuple[tuple[str, str], ...], option("With this metadata; repeat it.")]
    ids: Annotated[tuple[int, ...], option("At this offset; repeat it.", "--id", **_OFFSET)]
    first: Annotated[int | None, option("At this offset and after it.", "--from", **_OFFSET)]
    last: Annotated[int | None, option("Up to this offset.", "--to", **_OFFSET)]
    since: Annotated[datetime | None, option(_SINCE, type=MOMENT)]
    until: Annotated[datetime | None, option("Given up before this time.", type=MOMENT)]


def _letters(
    *, metadata: tuple[tuple[str, str], ...], ids: tuple[int, ...], first: int | None, last: int | None, **others: Any
) -> LetterFilter:
    after = 0 if first is None else first - 1
    return LetterFilter(metadata=dict(metadata), ids=ids or None, after=after, upto=last, **others)


@click.group()
def dlt() -> None:
    """List, show, redrive and dismiss dead letters.

    TOPIC is the topic of the original events. The dead letters are in TOPIC_dlt, and OFFSET is an offset there.
    """


@command(dlt, "list")
def list_dead_letters(
    context: CliContext,
    topic: TopicName,
    redriven: Annotated[
        bool | None,
        option(
            "Only those redriven or dismissed, or only open ones  [default: all].",
            "--redriven/--not-redriven",
            default=None,
        ),
    ],
    limit: Annotated[int, option("List the oldest N.", type=POSITIVE, default=100)],
    as_json: AsJson,
    **conditions: Unpack[_Filter],
) -> None:
    """List the dead letters of TOPIC. --backfill lists the dead letters of a backfill instead."""
    wanted = _letters(**conditions)
    with context.platform() as platform:
        _check_consumer(platform, topic, wanted)
        letters = platform.dead_letters.list(topic, wanted, limit=limit, redriven=redriven)
        _tell_of_backfills(platform, topic, wanted)
    columns: Columns = {
        **same("shard"), "offset": "id", "event": _metadata(dead_letter_values.SOURCE_OFFSET),
        "partition": _source_partition, **same("key", "consumer"),
        "attempts": _metadata(dead_letter_values.ATTEMPTS), "exception": _metadata(dead_letter_values.EXCEPTION),
        "message": _metadata(dead_letter_values.MESSAGE), "given up": "buffered_at",
        "redriven": "redriven_at", "dismissed": "dismissed_at",
    }  # fmt: skip
    spare = ("partition", "attempts", "given up")
    show_list(letters, columns, as_json=as_json, json=partial(_object, context), spare=spare)


def _metadata(name: str) -> Callable[[DeadLetter], object]:
    return lambda letter: letter.metadata.get(name)


def _tell_of_backfills(platform: EventSQL, topic: str, wanted: LetterFilter) -> None:
    if wanted.backfill is not None or wanted.ids is not None:
        return
    for backfill, letters in platform.dead_letters.of_backfills(topic).items():
        left_out = f"{counted(letters, 'dead letter')} of backfill {backfill} left out"
        say(f"{left_out}: `eventsql dlt list {topic} --backfill {backfill}` lists them")


def _check_consumer(platform: EventSQL, topic: str, wanted: LetterFilter) -> None:
    """Refuse the name of a consumer that neither exists nor has given up an event."""
    name = wanted.consumer
    # The topic may have been deleted, and its dead letters are still there.
    if name is None or (topic, name) in {(each.topic, each.name) for each in platform.registry.consumers()}:
        return
    if not platform.dead_letters.list(topic, LetterFilter(consumer=name, backfill=wanted.backfill), limit=1):
        platform.registry.consumer(topic, name)


def _tell_of_consumers(platform: EventSQL, topic: str, redrives: int) -> None:
    """Say that a redrive does not choose a consumer, if there are several."""
    consumers = {each.name for each in platform.registry.consumers(topic) if backfill_of(each.name) is None}
    if redrives and len(consumers) > 1:
        say(
            f"note: all {len(consumers)} consumers of the topic get the events, also those that have handled them: a "
            "handler may leave out an event whose metadata `redriven_consumer` names another consumer"
        )


def _transfer_letters(platform: EventSQL, topic: str) -> None:
    """Move the dead letters that still wait in the buffer: an event may have been given up a moment ago."""
    if (source := platform.dead_letters.topic_of(topic)) is not None:
        platform.transfer.run_once([source])


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
        "dismissed_at": letter.dismissed_at,
    }


@command(dlt)
def show(
    context: CliContext, topic: TopicName, offset: Annotated[int, argument(type=POSITIVE)], as_json: AsJson
) -> None:
    """Show the dead letter of TOPIC at OFFSET with its value: hexadecimal digits if it is not UTF-8 text."""
    with context.platform() as platform:
        letter = platform.dead_letters.show(topic, offset)
    if as_json:
        write_json(_object(context, letter))
        return
    columns: Columns = {
        **same("topic"), "offset": "id", "partition": partition_of, **same("key"), "event": "origin",
        "given up": "buffered_at", "in the log": "created_at", "redriven": "redriven_at", "dismissed": "dismissed_at",
    }  # fmt: skip
    show_fields(picked(letter, columns))
    if letter.metadata:
        write("\n")
        show_fields(letter.metadata)
    if letter.erased:
        write("\nthe event was erased\n")
        return
    try:
        value, form = letter.value.decode(), "as text"
    except UnicodeDecodeError:
        value, form = letter.value.hex(), "in hexadecimal"
    write(f"\n{counted(len(letter.value), 'byte')} {form}:\n\n{harmless(value)}\n")


@command(dlt)
def redrive(
    context: CliContext,
    *,
    topic: TopicName,
    limit: Annotated[int | None, option("The oldest N that are open.", type=POSITIVE)],
    again: Annotated[bool, option("Also dead letters that were redriven or dismissed before.")],
    execute: Annotated[bool, executing("Publish them")],
    as_json: AsJson,
    **conditions: Unpack[_Filter],
) -> None:
    """Publish the dead letters of TOPIC to it again, each once and in order: a plan and, with --execute, the redrive.

    The plan counts the letters; `eventsql dlt list TOPIC --not-redriven` lists them, with the same options.

    With options, only the dead letters that meet all of them. Dead letters that were redriven or dismissed before are
    left out without --again.

    Every consumer of TOPIC gets the events that are published again, also one that has handled them. Their metadata
    `redriven_consumer` names the consumer that had given them up. To hand an event to one consumer of Dagster or
    Airflow alone, replay its offset: `eventsql backfill TOPIC CONSUMER --from OFFSET --to OFFSET`.

    The dead letters of a backfill are left out too, because other consumers had handled their events. --backfill ID or
    --id publishes them anyway.
    """
    wanted = _letters(**conditions)
    with context.platform(transfer=execute) as platform:
        _check_consumer(platform, topic, wanted)
        _transfer_letters(platform, topic)
        _tell_of_backfills(platform, topic, wanted)
        if execute:
            redriven = platform.dead_letters.redrive(topic, wanted, limit=limit, again=again)
            if as_json:
                write_json({"redriven": redriven, "executed": True})
            say(f"{counted(redriven, 'dead letter')} of topic {topic!r} published again")
            _tell_of_consumers(platform, topic, redriven)
            return

        plan = platform.dead_letters.plan_redrive(topic, wanted, limit=limit, again=again)
        _tell_of_consumers(platform, topic, plan.redrives)
    if as_json:
        write_json({**asdict(plan), "executed": False})
    else:
        texts = {
            "dead letters": "letters", "redriven or dismissed before": "redriven_before",
            "would be published again": "redrives",
        }  # fmt: skip
        show_fields(picked(plan, texts))
    would = f"{counted(plan.redrives, 'dead letter')} of topic {topic!r} would be published again"
    say_plan(would, number=plan.redrives)


@command(dlt)
def dismiss(
    context: CliContext,
    *,
    topic: TopicName,
    limit: Annotated[int | None, option("The oldest N that are open.", type=POSITIVE)],
    execute: Annotated[bool, executing("Dismiss them")],
    as_json: AsJson,
    **conditions: Unpack[_Filter],
) -> None:
    """Close open dead letters of TOPIC without publishing them again: a plan and, with --execute, the dismissal.

    For events that somebody has put right in another way, or that need no handling. With options, only the dead letters
    that meet all of them: `eventsql dlt list TOPIC --not-redriven` lists them, with the same options. The dead letters
    of a backfill are left out without --backfill ID or --id.

    Dismissed letters stay in TOPIC_dlt until its retention deletes them. No check, figure or redrive counts them any
    more, and `eventsql dlt redrive TOPIC --again --execute` publishes them all the same.
    """
    wanted = _letters(**conditions)
    with context.platform() as platform:
        _check_consumer(platform, topic, wanted)
        _transfer_letters(platform, topic)
        _tell_of_backfills(platform, topic, wanted)
        if execute:
            dismissed = platform.dead_letters.dismiss(topic, wanted, limit=limit)
        else:
            dismissed = platform.dead_letters.plan_redrive(topic, wanted, limit=limit).redrives
    if as_json:
        write_json({"dismissed": dismissed, "executed": execute})
    letters = f"{counted(dismissed, 'dead letter')} of topic {topic!r}"
    if execute:
        say(f"{letters} dismissed")
    else:
        say_plan(f"{letters} would be dismissed", number=dismissed)
