"""The claims of a trigger: ranges of events, each leased until Airflow has stored it and a task takes it over.

A `ClaimProducer` claims a range for each partition of a consumer that has events (`consumer_claim`). Its claim is
leased for a minute until Airflow has stored the asset event, then for a minute until a task takes the claim over. A
claim whose event or run is lost ends with its lease. Its events are claimed again, and their task gets twice as long to
start. Offsets move only with the effects of the task that consumes the claim.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, aclosing, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Final, TypeVar

from airflow.triggers.shared_stream import AdvanceItem, SharedStreamProducer

from eventsql_orchestration import Consumer, Shard
from eventsql_orchestration.airflow.hook import EventSQLHook
from eventsql_orchestration.consuming.claims import Claim
from eventsql_orchestration.database.notifications import LOG
from eventsql_orchestration.errors import ClaimLostError, ConsumerNotFoundError, DatabaseBusyError, EventSQLError
from eventsql_orchestration.model import NOT_PARTITIONED
from eventsql_orchestration.orchestration.limits import RunLimits
from eventsql_orchestration.orchestration.owners import AIRFLOW_TRIGGER

logger = logging.getLogger(__name__)

T = TypeVar("T")

STORE_LEASE: Final = 60.0
"""Seconds until a claim ends if Airflow does not store its asset event. Airflow takes a second or two."""

RUN_LEASE: Final = 60.0
"""Seconds until a claim ends if no task takes it over. Airflow does not make a run for each asset event."""

ADVANCE_TIMEOUT: Final = 1.0
"""Seconds to wait until a claim is handed over; it is handed over later if its shard is slow."""

FIRST_BACKOFF: Final = 1.0
MAX_BACKOFF: Final = 30.0
"""Seconds between attempts while the database is away; each pause is twice the one before."""


@dataclass(frozen=True, slots=True)
class ClaimEvent:
    """A claim as the payload of an asset event: `after` is exclusive, `upto` inclusive, `events` their number.

    `partition` is -1 for a consumer without partitions. `shard` is None if there is one database.
    """

    topic: str
    consumer: str
    partition: int
    claim: int
    after: int
    upto: int
    events: int
    shard: str | None = None

    @classmethod
    def of(cls, claim: Claim) -> ClaimEvent:
        offsets = claim.range
        return cls(
            offsets.topic, claim.consumer, offsets.partition, claim.id, offsets.after, offsets.upto, claim.events,
            claim.shard,
        )  # fmt: skip

    @classmethod
    def read(cls, payload: object) -> ClaimEvent | None:
        """The claim of a payload; None for a payload of another trigger."""
        if not isinstance(payload, Mapping):
            return None
        try:
            return cls(**payload)
        except TypeError:
            return None

    def names(self, claim: Claim) -> bool:
        """Whether this is the event of a claim."""
        return self == ClaimEvent.of(replace(claim, shard=self.shard))


@dataclass(frozen=True, slots=True)
class Watched:
    """The consumer whose partitions a trigger claims, and the limits of the claims."""

    topic: str
    consumer: str
    limits: RunLimits

    def claims(self, shard: Shard) -> Iterator[Claim]:
        """Claim a range of each partition on a shard that has events and no owner. Raises `EventSQLError`."""
        states = shard.registry.consumer(self.topic, self.consumer)
        partitioned = states[0].partition != NOT_PARTITIONED
        for standing in shard.claims.standings(Consumer(self.topic, self.consumer, partitioned)):
            if not standing.waiting or standing.leased:
                continue
            # A topic that is repartitioned may have lost the partition since.
            with suppress(DatabaseBusyError, ConsumerNotFoundError):
                found = shard.claims.claim(
                    self.topic, self.consumer, standing.partition,
                    owner=AIRFLOW_TRIGGER, min_events=self.limits.min_events, max_events=self.limits.max_events,
                    max_wait=self.limits.max_wait, lease=STORE_LEASE,
                )  # fmt: skip
                if isinstance(found, Claim):
                    yield replace(found, shard=shard.name)


class _Lane:
    """The work on one shard, step by step in a thread of its own. A shard that is down delays no other shard."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.failing = False
        self.leases: dict[int, tuple[int, float]] = {}
        """The beginning and the lease of the latest claim of each partition."""
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="eventsql-claims")

    def do(self, work: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        """Do some work, after all earlier work. The work is done even if nobody waits for it any more."""
        return asyncio.get_running_loop().run_in_executor(self.thread, work, *arguments)

    def lease(self, claim: Claim, most: float) -> float:
        """Seconds for a task to start, at most `most`: twice as many as for a claim of the same events before.

        A run may only be late: Airflow that is busy must not get more and more runs.
        """
        after, before = self.leases.get(claim.range.partition, (None, 0.0))
        lease = min(2 * before if after == claim.range.after else RUN_LEASE, most)
        self.leases[claim.range.partition] = claim.range.after, lease
        return lease


class ClaimProducer(SharedStreamProducer):
    """Makes the claims of a trigger, one at a time for each partition."""

    def __init__(
        self, watched: Watched, open_hook: Callable[[], Any], *, start_timeout: float, poll_interval: float
    ) -> None:
        """`open_hook` returns an awaitable of the hook."""
        self._watched = watched
        self._open_hook = open_hook
        self._start_timeout = start_timeout
        self._poll_interval = poll_interval
        self._hook: EventSQLHook | None = None
        self._opening: ThreadPoolExecutor | None = None
        self._lanes: list[_Lane] = []
        self._pause = FIRST_BACKOFF

    async def open_stream(self) -> AsyncIterator[tuple[dict[str, Any], Claim]]:
        """Yield each new claim: its payload, and the claim itself. It waits while the databases are away."""
        try:
            while True:
                try:
                    await self._open()
                    async with aclosing(self._claims()) as claims:
                        async for claim in claims:
                            yield asdict(ClaimEvent.of(claim)), claim
                except EventSQLError as error:
                    # If the trigger failed, Airflow would start it again at once, each second.
                    logger.warning(
                        "claims of %s are tried again in %.0f s: %s", self._watched.topic, self._pause, error
                    )
                    # The connection may have changed.
                    await self.aclose()
                    await asyncio.sleep(self._pause)
                    self._pause = min(2 * self._pause, MAX_BACKOFF)
        finally:
            await self.aclose()

    async def _open(self) -> None:
        hook = await self._open_hook()
        # A thread goes on when its coroutine is cancelled: `aclose` waits for it, and then closes what it has opened.
        self._hook, self._opening = hook, ThreadPoolExecutor(1)
        shards = await asyncio.get_running_loop().run_in_executor(self._opening, _shards_of, hook)
        self._lanes = [_Lane(shard) for shard in shards]

    async def _claims(self) -> AsyncGenerator[Claim, None]:
        """The claims of all shards as they are made. Raises the error of a shard when none can be reached."""
        made: asyncio.Queue[Claim | Exception] = asyncio.Queue(1)
        watches = [asyncio.create_task(self._watch(lane, made)) for lane in self._lanes]
        try:
            while True:
                claim = await made.get()
                if isinstance(claim, Exception):
                    raise claim
                yield claim
        finally:
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)

    async def _watch(self, lane: _Lane, made: asyncio.Queue[Claim | Exception]) -> None:
        """Put the claims of one shard into `made`, or the error that ends the stream."""
        loop, woken = asyncio.get_running_loop(), asyncio.Event()
        pause = FIRST_BACKOFF
        while True:
            try:
                with await lane.do(self._listen, lane.shard, partial(_wake, loop, woken)):
                    while True:
                        woken.clear()
                        for claim in await lane.do(self._look, lane.shard):
                            await made.put(claim)
                        lane.failing, pause, self._pause = False, FIRST_BACKOFF, FIRST_BACKOFF
                        with suppress(TimeoutError):
                            # `asyncio.wait_for` of Python 3.11 can lose a cancellation: `_claims` would wait for ever.
                            async with asyncio.timeout(self._poll_interval):
                                await woken.wait()
            except EventSQLError as error:
                lane.failing = True
                if all(each.failing for each in self._lanes):
                    await made.put(error)
                    return
                shard = lane.shard.name or lane.shard.database
                logger.warning("claims on shard %s are tried again in %.0f s: %s", shard, pause, error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, MAX_BACKOFF)
            except Exception as error:  # noqa: BLE001 - the stream raises it
                await made.put(error)
                return

    def _listen(self, shard: Shard, wake: Callable[[], None]) -> ExitStack:
        stack = ExitStack()
        stack.callback(shard.listener.subscribe(LOG, self._watched.topic, wake))
        return stack

    def _look(self, shard: Shard) -> list[Claim]:
        if len(self._lanes) > 1 and shard.name is None and self._hook is not None:
            # This shard was down together with another shard, so its name was not known.
            _shards_of(self._hook)
        made: list[Claim] = []
        try:
            for claim in self._watched.claims(shard):
                made.append(claim)  # noqa: PERF402 - the claims before an error are made, too
        except EventSQLError:
            if not made:
                raise
        return made

    def get_advance_lane(self, broker_payload: Claim) -> Hashable:
        return broker_payload.shard, broker_payload.range.partition

    async def advance(self, batch: Sequence[AdvanceItem]) -> None:
        """Lease the claims whose asset events are stored until their tasks start; release the others.

        It waits for a moment only: Airflow calls it for one lane at a time, and a shard may be down.
        """
        lanes = {lane.shard.name: lane for lane in self._lanes}
        handed = [
            lane.do(self._advance, lane, item.broker_payload, item.outcome.acked > 0)
            for item in batch
            if (lane := lanes.get(item.broker_payload.shard)) is not None
        ]
        if handed:
            await asyncio.wait(handed, timeout=ADVANCE_TIMEOUT)

    def _advance(self, lane: _Lane, claim: Claim, stored: bool) -> None:
        try:
            if stored:
                lane.shard.claims.renew(claim, lease=lane.lease(claim, self._start_timeout))
            else:
                lane.shard.claims.release(claim)
        except ClaimLostError:
            # A task has taken it over.
            return
        except EventSQLError as error:
            # The lease ends by itself.
            logger.warning("%s could not be handed over: %s", claim, error)

    async def aclose(self) -> None:
        hook, self._hook = self._hook, None
        threads = [*(lane.thread for lane in self._lanes), *([] if self._opening is None else [self._opening])]
        self._lanes, self._opening = [], None
        if hook is not None:
            await asyncio.to_thread(_close, hook, threads)


def _shards_of(hook: EventSQLHook) -> tuple[Shard, ...]:
    """The shards, in a thread: the first use connects to them."""
    return hook.shards


def _close(hook: EventSQLHook, threads: Sequence[ThreadPoolExecutor]) -> None:
    """Close a hook after the work that is under way, which would open it again."""
    for thread in threads:
        thread.shutdown(cancel_futures=True)
    hook.close()


def _wake(loop: asyncio.AbstractEventLoop, woken: asyncio.Event) -> None:
    """Set an event of a loop from the listener's thread."""
    with suppress(RuntimeError):
        # The loop may be closed by now.
        loop.call_soon_threadsafe(woken.set)
