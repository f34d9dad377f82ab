"""The transfer as a schedule: each tick keeps it going in the code server, so that it needs no run."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

import dagster as dg

from eventsql_orchestration import EventSQL, Shard
from eventsql_orchestration.dagster.consumers.options import DEFAULT_TICKS
from eventsql_orchestration.dagster.resources import EventSQLResource
from eventsql_orchestration.dagster.shards import on_each
from eventsql_orchestration.dagster.tags import INTERNAL_RUN, PRIORITY_TAG, TRANSFER_TAG
from eventsql_orchestration.errors import DatabaseUnavailableError, EventSQLError, SchemaOutdatedError
from eventsql_orchestration.orchestration.shards import shards_of
from eventsql_orchestration.publishing.transfer import OnMoved, Transfer
from eventsql_orchestration.threads import start_thread
from eventsql_orchestration.validation import counted

TRANSFER: Final = "transfer"
"""The name of the schedule and its job, unless the location gives another one."""

STOP_TIMEOUT: Final = 10.0
"""Seconds in which a stopped transfer may finish its move. After them, the process ends and its transaction is rolled
back."""

HOLD_SECONDS: Final = 150.0
"""Seconds after a tick for which the code server goes on moving events: two ticks in a row may be late or fail."""

TICK_SECONDS: Final = 2.0
"""Seconds for which a tick moves events of a shard itself."""

ALL_SHARDS_SECONDS: Final = 20.0
"""Seconds for which a tick moves events of all shards together. Dagster gives a tick 60 s."""

JOB_SECONDS: Final = 60.0
"""Seconds for which a run of the job moves events, by default: until the next tick of the schedule."""

logger = logging.getLogger(__name__)


def build_transfer_schedule(
    *,
    name: str = TRANSFER,
    polling_delay: float = 0.2,
    limit_seconds: float = JOB_SECONDS,
    look_around: float = 1.0,
    default_status: dg.DefaultScheduleStatus = dg.DefaultScheduleStatus.RUNNING,
) -> dg.ScheduleDefinition:
    """The transfer, as a schedule that ticks every minute. It requests no runs.

    A tick moves the events in the buffer, for a few seconds at most. Then the code server goes on moving events in the
    background, each within `polling_delay` seconds, until no tick has come for some minutes. Each tick skips, and its
    reason has the numbers of events that were moved since the previous tick. A tick fails if the events of a topic
    cannot be moved, or if no database can be reached. Every `look_around` seconds, the background finishes publications
    over several shards, and starts consumers on added shards. The transfers of several processes share the topics.

    The job of the same name is for people: a run moves events for `limit_seconds` seconds.
    """

    @dg.op(name="move_events", description="Moves events from the buffer to their topics' logs.")
    def move_events(context: dg.OpExecutionContext, eventsql: EventSQLResource) -> None:
        moved = move_for(context.log, eventsql.platform, limit_seconds, polling_delay, look_around)
        context.add_output_metadata({"events": sum(moved.values()), **{f"events of {t}": n for t, n in moved.items()}})

    @dg.job(
        name=name,
        description=f"Moves events from the buffer to their topics' logs, for {limit_seconds:g} seconds.",
        executor_def=dg.in_process_executor,
        # A full queue of consumer runs must not delay the events that the consumers wait for.
        tags={TRANSFER_TAG: name, **INTERNAL_RUN, PRIORITY_TAG: "10"},
    )
    def transfer() -> None:
        move_events()

    @dg.schedule(
        name=name,
        job=transfer,
        cron_schedule="* * * * *",
        default_status=default_status,
        description="Moves events from the buffer to their topics' logs, in the code server. It needs no runs.",
        tags={TRANSFER_TAG: name, **INTERNAL_RUN},
    )
    def keep_moving(context: dg.ScheduleEvaluationContext, eventsql: EventSQLResource) -> dg.SkipReason:
        background = BACKGROUND.keep(eventsql, polling_delay, look_around)
        with eventsql.bounded(DEFAULT_TICKS.statement_timeout) as platform:
            return dg.SkipReason(tick(platform, background, context.log))

    return keep_moving


def tick(platform: EventSQL, background: "BackgroundTransfer", log: logging.Logger) -> str:
    """Move the events in the buffer, and say what was moved since the last tick.

    Raises the error of a topic whose events cannot be moved, or of a shard with a fault, after the other topics and
    shards had their turn. Raises `DatabaseUnavailableError` if no shard can be reached.
    """
    try:
        shards = shards_of(platform)
        done = on_each(shards, partial(_moved_now, seconds=min(TICK_SECONDS, ALL_SHARDS_SECONDS / len(shards))))
    except SchemaOutdatedError as error:
        return error.message
    for shard, fault in done.left_out.items():
        log.warning("shard %s: %s", shard, fault)
    faults = [fault for fault in done.left_out.values() if not isinstance(fault, DatabaseUnavailableError)]
    if faults or not done.of:
        raise (faults or list(done.left_out.values()))[0]

    moved = background.take()
    for counts in done.of.values():
        moved.update(counts)
    return "; ".join([_said(moved), *(f"shard {shard} is down" for shard in done.left_out)])


def _moved_now(shard: Shard, seconds: float) -> dict[str, int]:
    transfer = Transfer(shard.database, announce=shard.announce)
    try:
        # Another transfer may hold a topic whose events cannot be moved, and the tick has to find that out.
        return transfer.run_once(deadline=time.monotonic() + seconds, retry_held=True)
    finally:
        transfer.close()


def _said(moved: Mapping[str, int]) -> str:
    if not moved:
        return "no events were in the buffer since the last tick"
    topics = ", ".join(f"{count:,} of {topic}" for topic, count in sorted(moved.items(), key=lambda each: -each[1]))
    return f"moved {counted(sum(moved.values()), 'event')} since the last tick: {topics}"


class BackgroundTransfer:
    """The transfer of a platform in the background of this process. It ends when no tick prolongs it any more."""

    def __init__(self, eventsql: EventSQLResource, polling_delay: float, look_around: float) -> None:
        self._platform = eventsql.separate()
        self._polling_delay = polling_delay
        self._look_around = look_around
        self._lock = threading.Lock()
        self._moved: Counter[str] = Counter()
        self._until = 0.0
        self._ended = threading.Event()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._moving: _Moving | None = None

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def prolong(self, seconds: float) -> bool:
        """Go on for `seconds` seconds from now.

        False if the transfer has ended, or ends because it no longer moves the events of a shard. Then begin another.
        """
        with self._lock:
            if self._moving is not None and self._moving.faults:
                self._stop.set()
                return False
            if self.ended:
                return False
            self._until = time.monotonic() + seconds
            if self._thread is None:
                self._thread = start_thread("transfer-background", self._run)
            return True

    def take(self) -> Counter[str]:
        """The number of events that were moved since the last call, by topic."""
        with self._lock:
            taken, self._moved = self._moved, Counter()
        return taken

    def end(self) -> None:
        """End the transfer, and wait until it has finished its move."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(STOP_TIMEOUT * 2)

    def _run(self) -> None:
        try:
            with self._platform as platform:
                moving = self._moving = _Moving(shards_of(platform), self._polling_delay, self._count)
                with moving:
                    while not self._over() and not moving.ended.is_set():
                        _let_consumers_go(logger, platform)
                        self._stop.wait(self._look_around)
                for fault in moving.faults:
                    logger.error("the transfer in the background ends, and the next tick begins another: %s", fault)
        except EventSQLError as error:
            # The next tick finds the same error, and says so.
            logger.warning("the transfer in the background ends: %s", error)
        finally:
            with self._lock:
                self._ended.set()

    def _over(self) -> bool:
        with self._lock:
            if self._stop.is_set() or time.monotonic() >= self._until:
                # From here on, a tick begins another transfer.
                self._ended.set()
            return self.ended

    def _count(self, moved: Mapping[str, int]) -> None:
        with self._lock:
            self._moved.update(moved)


class _Background:
    """The transfers in the background of this process: one for each platform."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: dict[tuple[str, str], BackgroundTransfer] = {}

    def keep(
        self, eventsql: EventSQLResource, polling_delay: float, look_around: float, *, seconds: float = HOLD_SECONDS
    ) -> BackgroundTransfer:
        """Let the transfer of a platform go on for `seconds` seconds. Begins it if it is not under way."""
        key = (eventsql.dsn, eventsql.db_schema)
        with self._lock:
            current = self._of.get(key)
            if current is None or not current.prolong(seconds):
                current = self._of[key] = BackgroundTransfer(eventsql, polling_delay, look_around)
                current.prolong(seconds)
            return current

    def end(self) -> None:
        """End all of them, and wait until they have finished their moves."""
        with self._lock:
            ending, self._of = list(self._of.values()), {}
        for each in ending:
            each.end()


BACKGROUND: Final = _Background()


def move_for(
    log: logging.Logger, platform: EventSQL, seconds: float, polling_delay: float, look_around: float
) -> dict[str, int]:
    """Move events for some seconds. Returns the number of moved events per topic.

    Ends at once when the run is terminated. Raises the errors of the transfer, except `DatabaseUnavailableError`: then
    it waits for the database. If one of several shards fails, the others go on for the full time, and the error is
    raised at the end.
    """
    moved: Counter[str] = Counter()
    moving = _Moving(shards_of(platform), polling_delay, moved.update)
    moving.check()
    deadline = time.monotonic() + seconds
    with moving:
        while (left := deadline - time.monotonic()) > 0 and not moving.ended.wait(min(look_around, left)):
            _let_consumers_go(log, platform)
    if moving.faults:
        raise moving.faults[0]
    log.info("%s", _said(moved))
    return dict(moved)


class _Moving:
    """The transfer of each shard, or of the only database, each in its own thread while the block runs."""

    def __init__(self, shards: Sequence[Shard], polling_delay: float, on_moved: OnMoved) -> None:
        # With the platform's own transfer, the teardown would wait for a loop that does not end.
        self._transfers = [Transfer(shard.database, announce=shard.announce) for shard in shards]
        self._threads: list[threading.Thread] = []
        self._stop = threading.Event()
        self._counting = threading.Lock()
        self._left = len(self._transfers)
        self._polling_delay = polling_delay
        self._on_moved = on_moved
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

    def __enter__(self) -> None:
        try:
            for each in self._transfers:
                self._threads.append(start_thread("transfer-moving", self._loop, each))
        except BaseException:
            # If a thread cannot start, the threads that run already would never end.
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        deadline = time.monotonic() + STOP_TIMEOUT
        for transfer, thread in zip(self._transfers, self._threads, strict=False):
            thread.join(max(0.0, deadline - time.monotonic()))
            if not thread.is_alive():
                transfer.close()

    def _loop(self, transfer: Transfer) -> None:
        try:
            transfer.run(self._stop, polling_delay=self._polling_delay, on_moved=self._count)
        except BaseException as error:  # noqa: BLE001 - raised in the main thread
            self.faults.append(error)
        finally:
            with self._counting:
                self._left -= 1
                if not self._left:
                    self.ended.set()

    def _count(self, moved: dict[str, int]) -> None:
        with self._counting:
            self._on_moved(moved)


def _let_consumers_go(log: logging.Logger, platform: EventSQL) -> None:
    """Let consumers start on an added shard once they have come far enough on the others.

    Also finish publications over several shards that have not reached all of their shards.
    """
    try:
        platform.unfinished()
        platform.held_back()
    except EventSQLError as error:
        log.info(
            "could not finish publications, or start consumers on an added shard; trying again in a moment: %s", error
        )
