"""The transfer as a schedule: each tick keeps it going in the code server, so that it needs no run."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

import dagster as dg

from eventsql_orchestration import EventSQL
from eventsql_orchestration.dagster.consumers.options import DEFAULT_TICKS
from eventsql_orchestration.dagster.resources import EventSQLResource
from eventsql_orchestration.dagster.shards import on_each
from eventsql_orchestration.dagster.tags import INTERNAL_RUN, PRIORITY_TAG, TRANSFER_TAG
from eventsql_orchestration.errors import DatabaseUnavailableError, SchemaOutdatedError
from eventsql_orchestration.orchestration.shards import shards_of
from eventsql_orchestration.threads import start_thread
from eventsql_orchestration.validation import counted

TRANSFER: Final = "transfer"
"""The name of the schedule and its job, unless the location gives another one."""

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
    default_status: dg.DefaultScheduleStatus = dg.DefaultScheduleStatus.RUNNING,
) -> dg.ScheduleDefinition:
    """The transfer, as a schedule that ticks every minute. It requests no runs.

    A tick moves the events in the buffer, for a few seconds at most. Then the code server goes on moving events in the
    background, each within `polling_delay` seconds, until no tick has come for some minutes. Each tick skips, and its
    reason has the numbers of events that were moved since the previous tick. A tick fails if the events of a topic
    cannot be moved, or if no database can be reached. Every second, the background finishes publications over several
    shards, and starts consumers on added shards. The transfers of several processes share the topics.

    The job of the same name is for people: a run moves events for `limit_seconds` seconds.
    """

    @dg.op(name="move_events", description="Moves events from the buffer to their topics' logs.")
    def move_events(context: dg.OpExecutionContext, eventsql: EventSQLResource) -> None:
        until, transfer = Deadline(limit_seconds), eventsql.platform.transfer
        # This raises the errors of the transfer. `run` waits until they are over.
        moved = Counter(transfer.run_once())
        transfer.run(until, polling_delay=polling_delay, on_moved=moved.update)
        context.log.info("%s", _said(moved, "run began"))
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
        background = in_background(eventsql, polling_delay)
        with eventsql.bounded(DEFAULT_TICKS.statement_timeout) as platform:
            return dg.SkipReason(tick(platform, background, lambda: context.log))

    return keep_moving


def tick(platform: EventSQL, background: "BackgroundTransfer", open_log: Callable[[], logging.Logger]) -> str:
    """Move the events in the buffer, and say what was moved since the last tick.

    Raises the error of a topic whose events cannot be moved, or of a shard with a fault, after the other topics and
    shards had their turn. Raises `DatabaseUnavailableError` if no shard can be reached.
    """
    try:
        shards = shards_of(platform)
        seconds = min(TICK_SECONDS, ALL_SHARDS_SECONDS / len(shards))
        # Another transfer may hold a topic whose events cannot be moved, and the tick has to find that out.
        done = on_each(
            shards, lambda shard: shard.transfer.run_once(deadline=time.monotonic() + seconds, retry_held=True)
        )
    except SchemaOutdatedError as error:
        return error.message
    for shard, fault in done.left_out.items():
        open_log().warning("shard %s: %s", shard, fault)
    faults = [fault for fault in done.left_out.values() if not isinstance(fault, DatabaseUnavailableError)]
    if faults or not done.of:
        raise (faults or list(done.left_out.values()))[0]

    moved = background.take()
    for counts in done.of.values():
        moved.update(counts)
    return "; ".join([_said(moved, "last tick"), *(f"shard {shard} is down" for shard in done.left_out)])


def _said(moved: Mapping[str, int], since: str) -> str:
    if not moved:
        return f"no events were in the buffer since the {since}"
    topics = ", ".join(f"{count:,} of {topic}" for topic, count in sorted(moved.items(), key=lambda each: -each[1]))
    return f"moved {counted(sum(moved.values()), 'event')} since the {since}: {topics}"


class Deadline(threading.Event):
    """An event that is set by itself in `seconds` seconds, unless `prolong` puts that off before."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._at = time.monotonic() + seconds

    def is_set(self) -> bool:
        with self._lock:
            if time.monotonic() >= self._at:
                self.set()
            return super().is_set()

    def prolong(self, seconds: float) -> bool:
        """Put it off: it is set in `seconds` seconds from now. False if it is set already, and stays set."""
        with self._lock:
            if super().is_set():
                return False
            self._at = time.monotonic() + seconds
            return True


class BackgroundTransfer:
    """The transfer of a platform in the background of this process. It ends at the deadline `until`."""

    def __init__(self, eventsql: EventSQLResource, polling_delay: float, seconds: float) -> None:
        self._platform = eventsql.separate()
        self._polling_delay = polling_delay
        self._lock = threading.Lock()
        self._moved: Counter[str] = Counter()
        self.until = Deadline(seconds)
        self.thread = start_thread("transfer-background", self._run)

    def take(self) -> Counter[str]:
        """The number of events that were moved since the last call, by topic."""
        with self._lock:
            taken, self._moved = self._moved, Counter()
        return taken

    def _run(self) -> None:
        try:
            with self._platform as platform:
                platform.transfer.run(self.until, polling_delay=self._polling_delay, on_moved=self._count)
        except Exception as error:  # noqa: BLE001 - whatever it is, the next tick begins another transfer
            logger.error("the transfer in the background ends, and the next tick begins another: %s", error)
        finally:
            self.until.set()

    def _count(self, moved: Mapping[str, int]) -> None:
        with self._lock:
            self._moved.update(moved)


BACKGROUND: Final[dict[tuple[str, str], BackgroundTransfer]] = {}
"""The transfers in the background of this process, by URL and schema."""

_BEGINNING: Final = threading.Lock()


def in_background(
    eventsql: EventSQLResource, polling_delay: float, *, seconds: float = HOLD_SECONDS
) -> BackgroundTransfer:
    """Let the transfer of a platform go on for `seconds` seconds. Begins it if it is not under way."""
    key = (eventsql.dsn, eventsql.db_schema)
    with _BEGINNING:
        current = BACKGROUND.get(key)
        if current is None or not current.until.prolong(seconds):
            current = BACKGROUND[key] = BackgroundTransfer(eventsql, polling_delay, seconds)
        return current
