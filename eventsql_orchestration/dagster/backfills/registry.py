"""Backfills: replaying a range of a topic through a consumer, in windows, without moving the consumer's own offset.

Every window is a side consumer of its own, whose name says what it is:
`<consumer>__backfill_<id>_<after>_<upto>`, offsets after `after` up to and with `upto`. So what is known of consuming
holds for it: its offset moves in the transaction of the effects, claims and their epochs keep a second run out, events
that fail are retried and become dead letters, and retention keeps what is left to replay. The windows of a backfill are
registered in one statement and deleted together when all are done; until then, what is left is what they have left.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from eventsql_orchestration import NOT_PARTITIONED
from eventsql_orchestration.dagster.backfill_plans import BackfillPlanner
from eventsql_orchestration.dagster.windows import (
    Backfill,
    Plan,
    Replayed,
    Window,
    check_id,
    resume_command,
)
from eventsql_orchestration.database import Connection, driver_connection
from eventsql_orchestration.errors import RegistryError, ValidationError
from eventsql_orchestration.log import layouts
from eventsql_orchestration.log.positions import AtOffset
from eventsql_orchestration.log.registry import consumer_states, find_topic, lock_registry
from eventsql_orchestration.log.seek import Move
from eventsql_orchestration.log.side_consumers import MARK, SIDE_CONSUMER
from eventsql_orchestration.model import ConsumerState
from eventsql_orchestration.rules import check_name


class Backfills(BackfillPlanner):
    """Plans, registers, lists and deletes the backfills of one database."""

    # Registering

    def register(self, plan: Plan, backfill_id: str, *, into: str | None = None) -> Backfill:
        """Create the side consumers of a plan's windows, all or none. They keep retention off what is to be replayed.

        With `into`, a consumer of that name is left at the end of the range when the backfill is done. Raises
        `RegistryError` where a backfill of the consumer has the id, where `into` is a consumer that exists, and where
        the topic was created anew or retention dropped a part of the range meanwhile; `ValidationError` for an empty
        plan, and for `into` with some of the partitions of a topic that was repartitioned.
        """
        check_id(backfill_id)
        if not plan.runs:
            raise ValidationError("the range holds no events: there is nothing to replay")
        if into is not None and MARK in check_name("consumer name", into):
            raise ValidationError(f"{into!r} would be taken for a window of a backfill: choose a name without {MARK!r}")
        names = [window.consumer(plan.consumer, backfill_id, into) for window in plan.windows]
        partitions = {run.partition for run in plan.runs}
        with self._database.core() as connection:
            lock_registry(connection)
            driver = driver_connection(connection)
            if into is not None and consumer_states(connection, plan.topic, into):
                raise RegistryError(f"topic {plan.topic!r} has a consumer {into!r} already: name a new one")
            if self._registered(plan.topic, plan.consumer, backfill_id, driver):
                raise RegistryError(
                    f"consumer {plan.consumer!r} has a backfill {backfill_id} already: "
                    f"`{resume_command(plan.topic, plan.consumer, backfill_id)}` runs the rest of it"
                )
            registered = find_topic(connection, plan.topic)
            if registered is None or registered.created_at != plan.topic_created_at:
                raise RegistryError(f"topic {plan.topic!r} was deleted or created anew meanwhile: make the plan again")
            states = consumer_states(connection, plan.topic, plan.consumer)
            # After a repartitioning the events of before are in partitions that the consumer may not have any more.
            if not states or (states[0].partition == NOT_PARTITIONED) != (plan.partitions == (NOT_PARTITIONED,)):
                raise RegistryError(
                    f"consumer {plan.consumer!r} of topic {plan.topic!r} was deleted or registered anew meanwhile: "
                    "make the plan again"
                )
            if into is not None:
                _check_whole(plan, layouts.layouts(driver, self._database.schema, plan.topic))
            # Retention drops a log from its beginning.
            if self._first(driver, plan.topic, plan.after, plan.upto) != plan.first_event:
                raise RegistryError("retention dropped a part of the range meanwhile: make the plan again")
            windows = [(names, plan.windows, partitions)]
            if into is not None:
                # It consumes all of the partitions from there on, those that have no events in the range too.
                windows.append((names[:1], plan.windows[:1], {*plan.partitions} - partitions))
            for named, cut, chosen in windows:
                driver.execute(
                    self._queries("register"),
                    {
                        "topic": plan.topic,
                        "consumer": plan.consumer,
                        "names": named,
                        "afters": [window.after for window in cut],
                        "partitions": sorted(chosen),
                    },
                )
            (backfill,) = self._registered(plan.topic, plan.consumer, backfill_id, driver)
        return backfill

    # Looking

    def registered(self, topic: str | None = None) -> list[Backfill]:
        """The backfills that are registered, of one topic or of all: those that are not done."""
        if topic is not None:
            self._platform.registry.topic(topic)
        with self._database.connection() as connection:
            return self._registered(topic, None, None, connection)

    def find(self, topic: str, backfill_id: str, consumer: str | None = None) -> Backfill | None:
        """One of them; None where it is done, was deleted or never was."""
        with self._database.connection() as connection:
            found = self._registered(topic, consumer, backfill_id, connection)
        return found[0] if found else None

    def get(self, topic: str, backfill_id: str, consumer: str | None = None) -> Backfill:
        """The same. Raises `TopicNotFoundError`, and `RegistryError` where there is none."""
        backfill = self.find(topic, backfill_id, consumer)
        if backfill is None:
            self._platform.registry.topic(topic)
            of = "" if consumer is None else f" of consumer {consumer!r}"
            raise RegistryError(
                f"topic {topic!r} has no backfill {backfill_id!r}{of}: it is done or was deleted, or never was; "
                f"`eventsql backfill list {topic}` shows those that are left"
            )
        return backfill

    def left(self, topic: str, part: Replayed, limit: int) -> int:
        """How many events a window has left in a partition, counted up to `limit`."""
        with self._database.connection() as connection:
            return self._count(connection, topic, part.partition, after=part.offset, upto=part.window.upto, limit=limit)

    def _count(self, connection: Connection, topic: str, partition: int, *, after: int, upto: int, limit: int) -> int:
        row = connection.execute(
            self._queries("left_of_topic" if partition == NOT_PARTITIONED else "left_of", topic=topic),
            {"partition": partition, "after": after, "upto": upto, "limit": limit}, prepare=False,
        ).fetchone()  # fmt: skip
        assert row is not None, "an aggregate gives one row"
        return int(row[0])

    def _registered(
        self, topic: str | None, consumer: str | None, backfill_id: str | None, connection: Connection
    ) -> list[Backfill]:
        rows = connection.execute(self._queries("windows"), {"mark": MARK, "topic": topic}).fetchall()
        found: dict[tuple[str, str, str], list[tuple[re.Match[str], Any]]] = {}
        for row in rows:
            match = SIDE_CONSUMER.fullmatch(row[1])
            # Somebody may name a consumer of his own so that it has the mark, and nothing of the rest.
            if match is None or consumer not in {None, match["consumer"]} or backfill_id not in {None, match["id"]}:
                continue
            found.setdefault((row[0], match["consumer"], match["id"]), []).append((match, row))
        return [self._backfill(connection, key, parts) for key, parts in found.items()]

    def _backfill(
        self, connection: Connection, key: tuple[str, str, str], found: Sequence[tuple[re.Match[str], Any]]
    ) -> Backfill:
        topic, consumer, backfill_id = key
        parts = []
        for match, row in found:
            (_, name, partition, offset, consumed, paused, failed, attempts, most, failure, owner, lease, *others) = row
            _, due, given_up = others
            window = Window(int(match["after"]), int(match["upto"]), self._platform.shard)
            parts.append(
                Replayed(
                    window, partition, name, offset, consumed,
                    done=offset >= window.upto, paused=paused, owner=owner, lease_ends_at=lease,
                    failed_event=failed, spent=failed is not None and attempts >= most,
                    failure=failure if failed is not None else None, retry_in=due or 0.0,
                    given_up=given_up,
                )
            )  # fmt: skip
        parts = sorted(self._look_further(connection, topic, parts), key=lambda part: (part.window, part.partition))
        return Backfill(
            backfill_id, topic, consumer, found[0][0]["into"], min(row[12] for _, row in found), tuple(parts)
        )

    def _look_further(self, connection: Connection, topic: str, parts: Sequence[Replayed]) -> list[Replayed]:
        """Those whose offset is not at the end, but has no event before it, are done too."""
        open_parts = [number for number, part in enumerate(parts) if not part.done]
        unfinished = set()
        for query, chosen in (
            ("unfinished_topic", [n for n in open_parts if parts[n].partition == NOT_PARTITIONED]),
            ("unfinished", [n for n in open_parts if parts[n].partition != NOT_PARTITIONED]),
        ):
            if not chosen:
                continue
            rows = connection.execute(
                self._queries(query, topic=topic),
                {
                    "numbers": chosen,
                    "partitions": [parts[n].partition for n in chosen],
                    "offsets": [parts[n].offset for n in chosen],
                    "uptos": [parts[n].window.upto for n in chosen],
                },
                prepare=False,
            )
            unfinished |= {row[0] for row in rows}
        return [replace(part, done=number not in unfinished) for number, part in enumerate(parts)]

    # Ending

    def renew(self, backfill: Backfill) -> None:
        """Count failures anew, and give the windows that an event blocks, or that are paused, fresh attempts."""
        for name in sorted({part.name for part in backfill.parts if not part.done and (part.spent or part.paused)}):
            self._platform.registry.resume(backfill.topic, name)
        with self._database.connection() as connection:
            connection.execute(self._queries("count_anew"), {"topic": backfill.topic, "names": backfill.names})

    def finish(self, backfill: Backfill) -> bool:
        """Delete a backfill that is done, and leave the side consumer that it is for, if it has one.

        False where it is not done yet. Whoever comes second finds nothing left to do.
        """
        return self._end(backfill, only_done=True)

    def delete(self, backfill: Backfill) -> None:
        """Delete a backfill, done or not: what it has replayed stays, the rest never will be.

        Runs that are under way lose their claims. Waits at most 10 seconds for a batch, then `DatabaseBusyError`.
        """
        self._end(backfill, only_done=False)

    def _end(self, backfill: Backfill, *, only_done: bool) -> bool:
        topic = backfill.topic
        with self._database.core() as connection:
            lock_registry(connection)
            driver = driver_connection(connection)
            for name in backfill.names:
                consumer_states(connection, topic, name, lock=True)
            found = self._registered(topic, backfill.consumer, backfill.id, driver)
            if not found:
                return True
            (current,) = found
            if only_done and not current.done:
                return False
            if only_done and current.into is not None:
                driver.execute(
                    self._queries("keep_side_consumer"),
                    {"topic": topic, "names": current.names, "into": current.into, "upto": current.range.upto},
                )
                if any(part.partition != NOT_PARTITIONED for part in current.parts):
                    end = current.range.upto
                    layouts.move(driver, self._database.schema, topic, current.into, offset=end, until=end)
            driver.execute(self._queries("delete_windows"), {"topic": topic, "names": current.names})
        return True

    def take_over(self, backfill: Backfill) -> list[Move]:
        """Move the consumer's own offset to the end of a range: what of it was not consumed is left to the backfill.

        Partitions that are beyond the end stay. Raises `RegistryError` where a partition stands before the range, whose
        events in between nobody would consume, and `PartitionLeasedError` while somebody leases one of them; then none
        of them has moved.
        """
        topic, begin, end = backfill.topic, backfill.range.after, backfill.range.upto
        wanted = {part.partition for part in backfill.parts}

        def behind(states: Sequence[ConsumerState]) -> Sequence[ConsumerState]:
            chosen = [state for state in states if state.partition in wanted and state.last_event_id < end]
            with self._database.connection() as connection:
                for state in chosen:
                    if self._count(connection, topic, state.partition, after=state.last_event_id, upto=begin, limit=1):
                        raise RegistryError(
                            f"consumer {backfill.consumer!r} stands at offset {state.last_event_id}, before the range: "
                            "what lies between would be skipped; begin the range there"
                        )
            return chosen

        return self._platform.seeker.execute(topic, backfill.consumer, AtOffset(end + 1), choose=behind)


def _check_whole(plan: Plan, known: Sequence[layouts.Layout]) -> None:
    """Make sure that a consumer which is left at the end of a range can go on from one layout to the next."""
    inside = [
        each for each, end in zip(known, [*(after.after for after in known[1:]), plan.upto + 1], strict=False)
        if each.after < plan.upto and end > plan.after
    ]  # fmt: skip
    if NOT_PARTITIONED not in plan.partitions and any(each.partitions > len(plan.partitions) for each in inside):
        raise ValidationError(
            f"topic {plan.topic!r} was repartitioned, and a consumer goes from one number of partitions to the next as "
            "a whole: leave one with all of the partitions (without --partition), or none (without --into)"
        )
