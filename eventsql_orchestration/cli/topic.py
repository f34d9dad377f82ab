"""`eventsql topic`: the topics of the registry."""

from __future__ import annotations

from typing import Any

import click

from eventsql_orchestration.cli.context import CliContext, pass_context
from eventsql_orchestration.cli.output import counted, partition_name, say, show_fields, show_table, write_json
from eventsql_orchestration.cli.parameters import json_option, topic_argument
from eventsql_orchestration.errors import TopicNotFoundError
from eventsql_orchestration.model import NOT_PARTITIONED, Topic
from eventsql_orchestration.platform import EventSQL


@click.group()
def topic() -> None:
    """Create, list, describe and delete topics."""


@topic.command()
@topic_argument
@click.option(
    "--partitions",
    type=int,
    default=NOT_PARTITIONED,
    metavar="N",
    help="1 to 32767; without it the topic is not partitioned (-1).",
)
@click.option("--dead-letters", is_flag=True, help="Also create TOPIC_dlt, which takes what its consumers give up.")
@pass_context
def create(context: CliContext, *, topic: str, partitions: int, dead_letters: bool) -> None:
    """Create TOPIC, or find it as it is.

    The number of partitions of a topic that has neither events nor consumers is changed.
    """
    wanted = [Topic(topic, partitions)]
    if dead_letters:
        wanted.append(Topic(wanted[0].dead_letter_topic))
    with context.platform() as platform:
        for each in wanted:
            before = _find(platform, each.name)
            if each is wanted[0] or before is None:
                platform.registry.register_topic(each)
            if before is None:
                say(f"topic {each.name!r} created, {_partitions(each)}")
            elif each is wanted[0] and before != each:
                say(f"topic {each.name!r} is {_partitions(each)} now; it was {_partitions(before)}")
            else:
                say(f"topic {each.name!r} exists already, {_partitions(before)}")


def _find(platform: EventSQL, name: str) -> Topic | None:
    try:
        return platform.registry.topic(name)
    except TopicNotFoundError:
        return None


def _partitions(topic: Topic) -> str:
    return counted(topic.partitions, "partition") if topic.partitioned else "not partitioned"


@topic.command("list")
@json_option
@pass_context
def list_topics(context: CliContext, *, as_json: bool) -> None:
    """List the topics."""
    with context.platform() as platform:
        topics = platform.registry.topics()
    if as_json:
        write_json([_object(each) for each in topics])
    else:
        rows = [(each.name, each.partitions if each.partitioned else None, each.created_at) for each in topics]
        show_table(["topic", "partitions", "created (UTC)"], rows)


def _object(topic: Topic) -> dict[str, Any]:
    return {"topic": topic.name, "partitions": topic.partitions, "created_at": topic.created_at}


@topic.command()
@topic_argument
@json_option
@pass_context
def describe(context: CliContext, *, topic: str, as_json: bool) -> None:
    """Show TOPIC: its partitions, their events, and its consumers."""
    with context.platform() as platform:
        found = platform.registry.topic(topic)
        dead_letters = platform.dead_letters.topic_of(topic)
        partitions = [
            (partition, platform.reader.count(topic, partition=partition), platform.reader.end(topic, partition))
            for partition in found.all_partitions
        ]
        consumers = platform.lag(topic)
    if as_json:
        write_json(
            {
                **_object(found),
                "dead_letter_topic": dead_letters,
                "events": sum(events for _, events, _ in partitions),
                "log": [
                    {"partition": partition, "events": events, "end": end} for partition, events, end in partitions
                ],
                "consumers": [
                    {"consumer": each.consumer, "partition": each.partition, "offset": each.last_event_id,
                     "lag_events": each.events}
                    for each in consumers
                ],
            }
        )  # fmt: skip
        return
    show_fields(
        {
            "topic": found.name,
            "partitions": found.partitions if found.partitioned else "not partitioned",
            "created (UTC)": found.created_at,
            "dead letters": dead_letters,
        }
    )
    show_table(
        ["partition", "events", "newest offset"], [(partition_name(p), events, end) for p, events, end in partitions]
    )
    if consumers:
        show_table(
            ["consumer", "partition", "offset", "lag"],
            [(each.consumer, partition_name(each.partition), each.last_event_id, each.events) for each in consumers],
        )


@topic.command()
@topic_argument
@click.option("--force", is_flag=True, help="Delete its events and consumers with it.")
@pass_context
def delete(context: CliContext, *, topic: str, force: bool) -> None:
    """Delete TOPIC; one that has events or consumers only with --force."""
    with context.platform() as platform:
        platform.registry.unregister_topic(topic, force=force)
    say(f"topic {topic!r} deleted")
