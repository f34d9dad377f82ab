"""The transfer as a schedule: a run a minute, each of which moves events until the next has taken over."""

import threading
import time
from collections import Counter
from typing import Final

import dagster as dg

from eventsql_orchestration import EventSQL
from eventsql_orchestration.dagster.resources import EventSQLResource
from eventsql_orchestration.dagster.tags import (
    HOUSEKEEPING_INTERNAL,
    HOUSEKEEPING_TAG,
    MAX_RUNTIME_TAG,
    MOVING_TAG,
    PRIORITY_TAG,
    TRANSFER_TAG,
)
from eventsql_orchestration.log.transfer import Transfer

LOOK_AROUND: Final = 1.0
"""Seconds between two looks for a newer run."""

STOP_TIMEOUT: Final = 10.0
"""Seconds that the loop gets to finish what it is moving. One that does not is left to the end of its process, which
rolls its transaction back."""


def build_transfer_schedule(
    *,
    name: str = "transfer",
    polling_delay: float = 0.2,
    limit_seconds: float = 300.0,
    default_status: dg.DefaultScheduleStatus = dg.DefaultScheduleStatus.RUNNING,
) -> dg.ScheduleDefinition:
    """The transfer, as a schedule of one minute with its job.

    A run moves what is in the buffer, looks again after `polling_delay` seconds, and ends when a newer run of the job
    moves events of the same database, or after `limit_seconds`. Runs may overlap; a missed tick costs delay alone.
    """

    @dg.op(name="move_events", description="Moves events from the buffer to their topics' logs.")
    def move_events(context: dg.OpExecutionContext, eventsql: EventSQLResource) -> None:
        moved = transfer_until_relieved(
            context, eventsql.platform, polling_delay=polling_delay, limit_seconds=limit_seconds
        )
        context.add_output_metadata({"events": sum(moved.values()), **{f"events of {t}": n for t, n in moved.items()}})

    @dg.job(
        name=name,
        description="Moves events from the buffer to their topics' logs until the next run of this job has taken over.",
        executor_def=dg.in_process_executor,
        tags={
            TRANSFER_TAG: name,
            HOUSEKEEPING_TAG: HOUSEKEEPING_INTERNAL,
            # A full queue of consumers must not keep the transfer from what they wait for.
            PRIORITY_TAG: "10",
            MAX_RUNTIME_TAG: str(round(limit_seconds + 60)),
        },
    )
    def transfer() -> None:
        move_events()

    return dg.ScheduleDefinition(
        name=name,
        job=transfer,
        cron_schedule="* * * * *",
        default_status=default_status,
        description="Starts the next run of the transfer every minute.",
        tags={HOUSEKEEPING_TAG: HOUSEKEEPING_INTERNAL},
    )


def database_label(platform: EventSQL) -> str:
    """The database and schema that a run moves events of, without a password."""
    return f"{platform.database} {platform.database.schema}"


def transfer_until_relieved(
    context: dg.OpExecutionContext, platform: EventSQL, *, polling_delay: float, limit_seconds: float
) -> dict[str, int]:
    """Transfer until a newer run of the job does; gives the number of events moved per topic.

    Ends at once when the run is terminated. Raises what the transfer raises, `DatabaseUnavailableError` excepted, which
    is waited for.
    """
    moved: Counter[str] = Counter()
    faults: list[BaseException] = []
    stop, ended = threading.Event(), threading.Event()
    # The platform's own transfer would make its teardown wait for a loop that does not end.
    transfer = Transfer(platform.database, announce=platform.announce)

    def loop() -> None:
        try:
            transfer.run(stop, polling_delay=polling_delay, on_moved=moved.update)
        except BaseException as error:  # noqa: BLE001 - raised in the main thread
            faults.append(error)
        finally:
            ended.set()

    # The database answers and the tables are there: from here on this run relieves the one before it.
    transfer.run_once(topics=())
    label = database_label(platform)
    context.instance.add_run_tags(context.run.run_id, {MOVING_TAG: label})
    thread = threading.Thread(target=loop, name="eventsql-transfer-run", daemon=True)
    deadline = time.monotonic() + limit_seconds
    reason = f"its limit of {limit_seconds:g} s"
    thread.start()
    try:
        while not ended.wait(min(LOOK_AROUND, max(0.0, deadline - time.monotonic()))):
            if (newer := _newer_run(context, label)) is not None:
                reason = f"run {newer}, which has taken over"
                break
            if time.monotonic() >= deadline:
                break
    finally:
        stop.set()
        thread.join(STOP_TIMEOUT)
        if not thread.is_alive():
            transfer.close()
    if faults:
        raise faults[0]
    context.log.info("moved %d events (%s); ended by %s", sum(moved.values()), dict(moved) or "no topic", reason)
    return dict(moved)


def _newer_run(context: dg.OpExecutionContext, label: str) -> str | None:
    """A run of this job that was created after this one and moves events of the same database."""
    runs = context.instance.get_run_records(
        dg.RunsFilter(job_name=context.job_name, tags={MOVING_TAG: label}, statuses=[dg.DagsterRunStatus.STARTED]),
        limit=5,
    )
    mine = context.run.run_id
    newer = []
    for run in runs:
        if run.dagster_run.run_id == mine:
            break
        newer.append(run.dagster_run.run_id)
    return newer[0] if newer else None
