"""Arguments and options that several commands take."""

from __future__ import annotations

from typing import Any

import click

from eventsql_orchestration.errors import PartitionOutOfRangeError
from eventsql_orchestration.model import (
    NOT_PARTITIONED,
    ConsumerState,
    check_topic_name,
)
from eventsql_orchestration.rules import check_name


class TopicName(click.ParamType[str]):
    """A topic's name, refused before anything connects when no topic can be called so."""

    name = "topic"

    def convert(self, value: Any, param: object, ctx: object) -> str:  # noqa: ARG002 - click's
        return check_topic_name(value)


class ConsumerName(click.ParamType[str]):
    """A consumer's name, likewise."""

    name = "consumer"

    def convert(self, value: Any, param: object, ctx: object) -> str:  # noqa: ARG002 - click's
        return check_name("consumer name", value)


topic_argument = click.argument("topic", type=TopicName())
optional_topic_argument = click.argument("topic", type=TopicName(), required=False)
consumer_argument = click.argument("consumer", type=ConsumerName())
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
max_option = click.option("--max", "max_events", type=click.IntRange(min=1), metavar="N", help="End after N events.")
follow_option = click.option("--follow", is_flag=True, help="Go on with what comes, until Ctrl-C.")
partition_option = click.option("--partition", type=int, metavar="N", help="This partition alone.")


def choose_partitions(states: list[ConsumerState], partition: int | None) -> list[int]:
    """The partitions of a consumer to consume: the one that is asked for, or all.

    Raises `PartitionOutOfRangeError`.
    """
    own = [state.partition for state in states]
    if partition is None or [partition] == own:
        return own
    name = states[0].name
    if own == [NOT_PARTITIONED]:
        raise PartitionOutOfRangeError(
            f"partition {partition} is out of range: consumer {name!r} is not partitioned, it reads all of them as one"
        )
    if partition not in own:
        raise PartitionOutOfRangeError(
            f"partition {partition} is out of range: consumer {name!r} has partitions 0 to {len(own) - 1}"
        )
    return [partition]
