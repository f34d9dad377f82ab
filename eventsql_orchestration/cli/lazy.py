"""Names that the commands load at their first use, so that `--version`, `--help` and completion load none of them.

A module of the command line writes `lazy.EventSQL` where a command runs, and imports the name for annotations only. A
module that imports this module is not named here: that would be a circle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from eventsql_orchestration.first_use import on_first_use

if TYPE_CHECKING:
    from psycopg import connect
    from rich.console import Console, Group
    from rich.live import Live
    from rich.progress import BarColumn, Progress, SpinnerColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.table import Table
    from rich.text import Text

    from eventsql_orchestration.airflow.api import running_airflow
    from eventsql_orchestration.airflow.backfills import AirflowRuns
    from eventsql_orchestration.airflow.trace import ServedDagRuns
    from eventsql_orchestration.capture.captures import Captures
    from eventsql_orchestration.capture.values import drop_command
    from eventsql_orchestration.cli.dagster_here import dagster_launcher, dagster_runs, local_dagster
    from eventsql_orchestration.cli.failures import message_of
    from eventsql_orchestration.client.eventsql import EventSQL
    from eventsql_orchestration.database import Queries
    from eventsql_orchestration.database.embedded import EmbeddedPostgres
    from eventsql_orchestration.database.notifications import LOG, STORE
    from eventsql_orchestration.metrics.figures import FiguresReader
    from eventsql_orchestration.queue.lag import queue_lags
    from eventsql_orchestration.settings import SETTINGS_FILE, Settings
    from eventsql_orchestration.store.change import Change, StoreCheckpoint
    from eventsql_orchestration.store.lag import SubscriptionLagReader
    from eventsql_orchestration.store.store import Store
    from eventsql_orchestration.store.subscription_rows import not_found
    from eventsql_orchestration.topics.catalog import choose_partitions
    from eventsql_orchestration.topics.offsets import offset_of
    from eventsql_orchestration.topics.registry import default_storage
    from eventsql_orchestration.views import Views

__all__ = [
    "LOG", "SETTINGS_FILE", "STORE", "AirflowRuns", "BarColumn", "Captures", "Change", "Console", "EmbeddedPostgres",
    "EventSQL", "FiguresReader", "Group", "Live", "Progress", "Queries", "ServedDagRuns", "Settings", "SpinnerColumn",
    "Store", "StoreCheckpoint", "SubscriptionLagReader", "Table", "Text", "TimeElapsedColumn", "TimeRemainingColumn",
    "Views", "choose_partitions", "connect", "dagster_launcher", "dagster_runs", "default_storage", "drop_command",
    "local_dagster", "message_of", "not_found", "offset_of", "queue_lags", "running_airflow",
]  # fmt: skip

_PACKAGE: Final = "eventsql_orchestration"

__getattr__ = on_first_use(
    __name__,
    {
        "psycopg": ("connect",),
        "rich.console": ("Console", "Group"),
        "rich.live": ("Live",),
        "rich.progress": ("BarColumn", "Progress", "SpinnerColumn", "TimeElapsedColumn", "TimeRemainingColumn"),
        "rich.table": ("Table",),
        "rich.text": ("Text",),
        f"{_PACKAGE}.airflow.api": ("running_airflow",),
        f"{_PACKAGE}.airflow.backfills": ("AirflowRuns",),
        f"{_PACKAGE}.airflow.trace": ("ServedDagRuns",),
        f"{_PACKAGE}.capture.captures": ("Captures",),
        f"{_PACKAGE}.capture.values": ("drop_command",),
        f"{_PACKAGE}.cli.dagster_here": ("dagster_launcher", "dagster_runs", "local_dagster"),
        f"{_PACKAGE}.cli.failures": ("message_of",),
        f"{_PACKAGE}.client.eventsql": ("EventSQL",),
        f"{_PACKAGE}.database.embedded": ("EmbeddedPostgres",),
        f"{_PACKAGE}.database": ("Queries",),
        f"{_PACKAGE}.database.notifications": ("LOG", "STORE"),
        f"{_PACKAGE}.metrics.figures": ("FiguresReader",),
        f"{_PACKAGE}.queue.lag": ("queue_lags",),
        f"{_PACKAGE}.settings": ("SETTINGS_FILE", "Settings"),
        f"{_PACKAGE}.store.change": ("Change", "StoreCheckpoint"),
        f"{_PACKAGE}.store.lag": ("SubscriptionLagReader",),
        f"{_PACKAGE}.store.store": ("Store",),
        f"{_PACKAGE}.store.subscription_rows": ("not_found",),
        f"{_PACKAGE}.topics.catalog": ("choose_partitions",),
        f"{_PACKAGE}.topics.offsets": ("offset_of",),
        f"{_PACKAGE}.topics.registry": ("default_storage",),
        f"{_PACKAGE}.views": ("Views",),
    },
)
