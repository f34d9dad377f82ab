"""The transfer as a schedule: a run a minute, each of which moves events until the next has taken over."""

import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Final

import dagster as dg

from eventsql_orchestration import EventSQL
from eventsql_orchestration.dagster.resources import EventSQLResource
from eventsql_orchestration.dagster.shards import shards_of
from eventsql_orchestration.dagster.tags import (
    HOUSEKEEPING_INTERNAL,
    HOUSEKEEPING_TAG,
    MAX_RUNTIME_TAG,
    MOVING_TAG,
    PRIORITY_TAG,
    TRANSFER_TAG,
)
from eventsql_orchestration.errors import DatabaseUnavailableError, EventSQLError
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
    moves events of the same database, or after `limit_seconds`. Runs may overlap; a missed tick costs delay alone. Of
    several shards it is on all of them at once, and on one that is down when that is back.
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
    """The databases and the schema that a run moves events of, without a password."""
    databases = sorted(str(shard.database) for shard in platform.shards)
    return f"{', '.join(databases)} {platform.shards[0].database.schema}"


def transfer_until_relieved(
    context: dg.OpExecutionContext, platform: EventSQL, *, polling_delay: float, limit_seconds: float
) -> dict[str, int]:
    """Transfer until a newer run of the job does; gives the number of events moved per topic.

    Ends at once when the run is terminated. Raises what the transfer raises, `DatabaseUnavailableError` excepted, which
    is waited for; of several shards, when those where nothing is wrong have been moved as long.
    """
    moving = _Moving(shards_of(platform), polling_delay)
    moving.check()
    # The database answers and the tables are there: from here on this run relieves the one before it.
    label = database_label(platform)
    context.instance.add_run_tags(context.run.run_id, {MOVING_TAG: label})
    deadline = time.monotonic() + limit_seconds
    reason = f"its limit of {limit_seconds:g} s"
    moving.begin()
    try:
        while not moving.ended.wait(min(LOOK_AROUND, max(0.0, deadline - time.monotonic()))):
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
    """The transfer of each shard, or of the only database, in a thread of its own."""

    def __init__(self, shards: Sequence[EventSQL], polling_delay: float) -> None:
        # The platform's own transfer would make its teardown wait for a loop that does not end.
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
        """What is wrong with a shard, or was the end of its thread; the others go on."""
        self.ended = threading.Event()

    def check(self) -> None:
        """Note what is wrong with a shard other than that it is down. Raises it where nothing is right with any."""
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
    """Let consumers go on with a shard that was added, where they have come so far on the others.

    And finish what was published over several shards at once, and lies on some of them only.
    """
    if len(platform.shards) == 1:
        return
    # Whoever has one database does not load what many need.
    from eventsql_orchestration.sharded import ShardedEventSQL  # noqa: PLC0415

    assert isinstance(platform, ShardedEventSQL), "it has several"
    try:
        platform.unfinished()
        platform.held_back()
    except EventSQLError as error:
        context.log.info("consumers of a shard that was added are looked at again in a moment: %s", error)


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
