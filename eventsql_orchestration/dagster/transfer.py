"""The transfer as a schedule: one run each minute, which moves events until the next run takes over."""

import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Final

import dagster as dg

from eventsql_orchestration import EventSQL, Shard
from eventsql_orchestration.dagster.resources import EventSQLResource
from eventsql_orchestration.dagster.shards import shards_of
from eventsql_orchestration.dagster.tags import (
    INTERNAL_RUN,
    MAX_RUNTIME_TAG,
    MOVING_TAG,
    PRIORITY_TAG,
    TRANSFER_TAG,
)
from eventsql_orchestration.errors import DatabaseUnavailableError, EventSQLError
from eventsql_orchestration.publishing.transfer import Transfer

STOP_TIMEOUT: Final = 10.0
"""Seconds that a stopped loop has to finish its move. After that, the end of the process rolls its transaction back."""


def build_transfer_schedule(
    *,
    name: str = "transfer",
    polling_delay: float = 0.2,
    limit_seconds: float = 300.0,
    look_around: float = 1.0,
    default_status: dg.DefaultScheduleStatus = dg.DefaultScheduleStatus.RUNNING,
) -> dg.ScheduleDefinition:
    """The transfer, as a schedule of one minute with its job.

    A run moves the events in the buffer and looks again after `polling_delay` seconds. It ends when a newer run of the
    job moves events of the same database, or after `limit_seconds`. Every `look_around` seconds it looks for a newer
    run. Runs may overlap; a missed tick only costs delay. A run moves events of all shards at once. Events of a shard
    that is down move when it is back.
    """

    @dg.op(name="move_events", description="Moves events from the buffer to their topics' logs.")
    def move_events(context: dg.OpExecutionContext, eventsql: EventSQLResource) -> None:
        moved = transfer_until_relieved(
            context, eventsql.platform, polling_delay=polling_delay, limit_seconds=limit_seconds,
            look_around=look_around,
        )  # fmt: skip
        context.add_output_metadata({"events": sum(moved.values()), **{f"events of {t}": n for t, n in moved.items()}})

    @dg.job(
        name=name,
        description="Moves events from the buffer to their topics' logs until the next run of this job takes over.",
        executor_def=dg.in_process_executor,
        tags={
            TRANSFER_TAG: name,
            **INTERNAL_RUN,
            # A full queue of consumer runs must not delay the events that the consumers wait for.
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
        tags=INTERNAL_RUN,
    )


def database_label(platform: EventSQL) -> str:
    """The databases and the schema of the events that a run moves, without a password."""
    databases = sorted(str(shard.database) for shard in platform.shards)
    return f"{', '.join(databases)} {platform.shards[0].database.schema}"


def transfer_until_relieved(
    context: dg.OpExecutionContext,
    platform: EventSQL,
    *,
    polling_delay: float,
    limit_seconds: float,
    look_around: float,
) -> dict[str, int]:
    """Transfer until a newer run of the job transfers. Returns the number of moved events per topic.

    Ends at once when the run is terminated. Raises the errors of the transfer, except `DatabaseUnavailableError`: then
    it waits for the database. If one of several shards fails, the others go on for the full time, and the error is
    raised at the end.
    """
    moving = _Moving(shards_of(platform), polling_delay)
    moving.check()
    # The database answers and the tables exist: from here on, this run replaces the run before it.
    label = database_label(platform)
    context.instance.add_run_tags(context.run.run_id, {MOVING_TAG: label})
    deadline = time.monotonic() + limit_seconds
    reason = f"its limit of {limit_seconds:g} s"
    moving.begin()
    try:
        while not moving.ended.wait(min(look_around, max(0.0, deadline - time.monotonic()))):
            _let_consumers_go(context, platform)
            if (newer := _newer_run(context, label)) is not None:
                reason = f"run {newer}, which has taken over"
                break
            if time.monotonic() >= deadline:
                break
    finally:
        moving.end()
    if moving.faults:
        raise moving.faults[0]
    moved = dict(moving.moved)
    context.log.info("moved %d events (%s); ended by %s", sum(moved.values()), moved or "no topic", reason)
    return moved


class _Moving:
    """The transfer of each shard, or of the only database, each in its own thread."""

    def __init__(self, shards: Sequence[Shard], polling_delay: float) -> None:
        # With the platform's own transfer, the teardown would wait for a loop that does not end.
        self._transfers = [Transfer(shard.database, announce=shard.announce) for shard in shards]
        self._threads = [
            threading.Thread(target=self._loop, args=(each, polling_delay), name="eventsql-transfer-run", daemon=True)
            for each in self._transfers
        ]
        self._stop = threading.Event()
        self._counting = threading.Lock()
        self._left = len(self._threads)
        self.moved: Counter[str] = Counter()
        self.faults: list[BaseException] = []
        """The fault of a shard, or the error that ended its thread. The others go on."""
        self.ended = threading.Event()

    def check(self) -> None:
        """Note the fault of each shard, unless the shard is down. Raises an error if no shard works."""
        wrong: list[EventSQLError] = []
        for each in self._transfers:
            try:
                each.run_once(topics=())
            except EventSQLError as error:
                wrong.append(error)
        self.faults += [error for error in wrong if not isinstance(error, DatabaseUnavailableError)]
        if len(wrong) == len(self._transfers):
            raise (self.faults or wrong)[0]

    def begin(self) -> None:
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._stop.set()
        deadline = time.monotonic() + STOP_TIMEOUT
        for transfer, thread in zip(self._transfers, self._threads, strict=True):
            thread.join(max(0.0, deadline - time.monotonic()))
            if not thread.is_alive():
                transfer.close()

    def _loop(self, transfer: Transfer, polling_delay: float) -> None:
        try:
            transfer.run(self._stop, polling_delay=polling_delay, on_moved=self._count)
        except BaseException as error:  # noqa: BLE001 - raised in the main thread
            self.faults.append(error)
        finally:
            with self._counting:
                self._left -= 1
                if not self._left:
                    self.ended.set()

    def _count(self, moved: dict[str, int]) -> None:
        with self._counting:
            self.moved.update(moved)


def _let_consumers_go(context: dg.OpExecutionContext, platform: EventSQL) -> None:
    """Let consumers start on an added shard once they have come far enough on the others.

    Also finish publications over several shards that are on some of the shards only.
    """
    try:
        platform.unfinished()
        platform.held_back()
    except EventSQLError as error:
        context.log.info(
            "could not finish publications, or start consumers on an added shard; trying again in a moment: %s", error
        )


def _newer_run(context: dg.OpExecutionContext, label: str) -> str | None:
    """A newer run of this job that moves events of the same database."""
    runs = context.instance.get_run_records(
        dg.RunsFilter(job_name=context.job_name, tags={MOVING_TAG: label}, statuses=[dg.DagsterRunStatus.STARTED]),
        limit=1,
    )
    mine = context.run.run_id
    # The newest run comes first.
    return runs[0].dagster_run.run_id if runs and runs[0].dagster_run.run_id != mine else None
