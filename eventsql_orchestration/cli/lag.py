"""`eventsql lag`: how far each consumer partition is behind, and why."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from eventsql_orchestration.cli import lazy
from eventsql_orchestration.cli.context import CliContext
from eventsql_orchestration.cli.output import (
    Columns,
    partition_of,
    same,
    show,
    stdout_is_terminal,
    table_of,
    write_json,
)
from eventsql_orchestration.cli.parameters import AsJson, Number, OptionalTopicName, command, option
from eventsql_orchestration.consuming.lag_values import ConsumerLag, LagCause

if TYPE_CHECKING:
    from rich.table import Table


@command(short_help="Show how far consumers are behind, and why.")
def lag(
    context: CliContext,
    topic: OptionalTopicName,
    watch: Annotated[bool, option("Refresh it until Ctrl-C.")],
    interval: Annotated[
        float, option("How often --watch refreshes.", type=Number(0.1, 86_400), default=2.0, metavar="SECONDS")
    ],
    as_json: AsJson,
) -> None:
    """Show how far the consumers of TOPIC, or of all topics, are behind.

    Columns: events counts the events that are not consumed yet; buffered counts the part of them that is not
    transferred yet; seconds is the age of the oldest; offset is the last consumed event, end the newest event, and why
    the cause. With --json, --watch prints a line for each refresh.
    """
    with context.platform() as platform:
        if not watch:
            _show(context, platform.lag(topic), as_json=as_json)
        elif as_json or not stdout_is_terminal():
            while True:
                _show(context, platform.lag(topic), as_json=as_json, indent=None)
                time.sleep(interval)
        else:
            with lazy.Live(lag_table(platform.lag(topic)), console=lazy.Console(), auto_refresh=False) as live:
                while True:
                    time.sleep(interval)
                    live.update(lag_table(platform.lag(topic)), refresh=True)


def _show(context: CliContext, lags: list[ConsumerLag], *, as_json: bool, indent: int | None = 2) -> None:
    if as_json:
        write_json([{**context.on_shard(each.shard), **_object(each)} for each in lags], indent=indent)
    else:
        show(lag_table(lags))


def _object(lag: ConsumerLag) -> dict[str, object]:
    return {
        "offset" if name == "last_event_id" else name: value for name, value in asdict(lag).items() if name != "shard"
    }


def _why(lag: ConsumerLag) -> str | None:
    match lag.cause:
        case LagCause.NONE:
            return None
        case LagCause.WAITING | LagCause.TRANSFER:
            return lag.cause.value
        case _:
            return f"{lag.cause.value}, {lag.detail}"


def lag_table(lags: list[ConsumerLag]) -> Table:
    """A table of the lag for people, with a row for each consumer partition."""
    columns: Columns = {
        **same("topic", "consumer", "shard"), "partition": partition_of, **same("events", "seconds"),
        "offset": "last_event_id", **same("end", "buffered"), "why": _why,
    }  # fmt: skip
    return table_of(lags, columns)
