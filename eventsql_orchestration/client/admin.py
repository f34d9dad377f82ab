"""Seeking, dead letters and repartitioning over shards."""

from __future__ import annotations

from builtins import list as list_of
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final

from eventsql_orchestration.boundary import checked
from eventsql_orchestration.database import Connection
from eventsql_orchestration.errors import DatabaseBusyError, ShardError, TopicNotFoundError, ValidationError
from eventsql_orchestration.log.dead_letters import (
    DeadLetter,
    DeadLetterCause,
    DeadLetterFactory,
    DeadLetters,
    LetterFilter,
    RedrivePlan,
)
from eventsql_orchestration.log.lag import ConsumerLag, LagCause
from eventsql_orchestration.log.patience import Patience
from eventsql_orchestration.log.positions import AtOffset, Position
from eventsql_orchestration.log.registry import choose_partitions
from eventsql_orchestration.log.repartition import PATIENCE_SECONDS, Repartitioner, Repartitioning
from eventsql_orchestration.log.seek import Move, Seeker
from eventsql_orchestration.model import ConsumerState, Event
from eventsql_orchestration.sharded.decisions import Decisions, Unfinished
from eventsql_orchestration.sharded.everywhere import everywhere
from eventsql_orchestration.sharded.gates import Gates, HeldBack
from eventsql_orchestration.sharded.member import Member
from eventsql_orchestration.sharded.members import Members
from eventsql_orchestration.sharded.registry import ShardedRegistry

ABANDONED_SECONDS: Final = 5.0
"""After so long, a publication over several shards that is announced and not decided is given up for a repartitioning,
which such a one of that topic could not outlive in any case."""


@checked
class ShardedSeeker(Seeker):
    """A `Seeker` over shards: a consumer moves on all of them, one after the other."""

    def __init__(self, members: Members, registry: ShardedRegistry, gates: Gates) -> None:
        self._members = members
        self._sharded = registry
        self._gates = gates

    def plan(self, topic: str, consumer: str, position: Position, *, partition: int | None = None) -> list[Move]:
        _check_position(position)
        self._choose(topic, consumer, partition)
        moves: list[Move] = []
        for member in self._members.up():
            with self._members.using(member):
                planned = member.platform.seeker.plan(topic, consumer, position, partition=partition)
            moves += [replace(move, shard=member.name) for move in planned]
        return moves

    def execute(
        self,
        topic: str,
        consumer: str,
        position: Position,
        *,
        partition: int | None = None,
        force: bool = False,
        choose: Callable[[Sequence[ConsumerState]], Sequence[ConsumerState]] | None = None,
    ) -> list[Move]:
        """As on one database, on all shards, which must be up. Where one fails, the error says which have moved.

        Where the consumer goes back on shards to which others were added, it gets the events of those after it has
        consumed what was there before them, so that a key's events come in their order again.
        """
        _check_position(position)
        self._choose(topic, consumer, partition)

        def move(member: Member) -> list[Move]:
            moves = member.platform.seeker.execute(
                topic, consumer, position, partition=partition, force=force, choose=choose
            )
            return [replace(each, shard=member.name) for each in moves]

        with self._gates.moving(topic, consumer):
            done = everywhere(self._members, move)
        return [each for moves in done.values() for each in moves]

    def _choose(self, topic: str, consumer: str, partition: int | None) -> None:
        states = self._sharded.consumer(topic, consumer)
        choose_partitions([state for state in states if state.shard == states[0].shard], partition)


def _check_position(position: Position) -> None:
    if isinstance(position, AtOffset):
        raise ValidationError(
            "an offset means another place on each shard: seek to a time, or one shard by itself (--shard NAME, "
            "platform.shards[i].seeker)"
        )


@checked
class ShardedDeadLetters(DeadLetters):
    """`DeadLetters` over shards: a letter lies on the shard of its event, and is redriven there."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._made_by: DeadLetterFactory | None = None

    @property
    def made_by(self) -> DeadLetterFactory | None:
        """The factory that is configured."""
        return self._made_by

    def configure(self, factory: DeadLetterFactory | None) -> None:
        self._made_by = factory
        for platform in self._members.platforms:
            platform.dead_letters.configure(factory)

    def topic_of(self, topic: str, connection: Connection | None = None) -> str | None:
        if connection is not None:
            return self._members.of_connection(connection).platform.dead_letters.topic_of(topic, connection)
        return self._members.up()[0].platform.dead_letters.topic_of(topic)

    def accepts(self, topic: str, connection: Connection | None = None) -> bool:
        return self._made_by is not None or self.topic_of(topic, connection) is not None

    def bury(self, connection: Connection, event: Event, cause: DeadLetterCause) -> bool:
        return self._members.of_connection(connection).platform.dead_letters.bury(connection, event, cause)

    def plan_redrive(
        self, topic: str, letters: LetterFilter | None = None, *, limit: int | None = None, again: bool = False
    ) -> RedrivePlan:
        _check_ids(letters)
        plans = [
            each.platform.dead_letters.plan_redrive(topic, letters, limit=limit, again=again)
            for each in self._members.up()
        ]
        redrives = sum(plan.redrives for plan in plans)
        return RedrivePlan(
            sum(plan.letters for plan in plans),
            sum(plan.redriven_before for plan in plans),
            redrives if limit is None else min(limit, redrives),
        )

    def redrive(
        self, topic: str, letters: LetterFilter | None = None, *, limit: int | None = None, again: bool = False
    ) -> int:
        """As on one database, one shard after the other; those that are down keep theirs."""
        _check_ids(letters)
        redriven = 0
        for member in self._members.up():
            left = None if limit is None else limit - redriven
            with self._members.using(member):
                redriven += member.platform.dead_letters.redrive(topic, letters, limit=left, again=again)
        return redriven

    def prune(self, topic: str | None = None) -> int:
        return sum(member.platform.dead_letters.prune(topic) for member in self._members.up())

    def show(self, topic: str, letter_id: int) -> DeadLetter:
        """Offsets are per shard. Raises `ShardError`: look on one, `platform.shards[i].dead_letters`."""
        raise ShardError(
            f"offset {letter_id} of topic {topic!r} means another letter on each shard: name one (--shard NAME, "
            "platform.shards[i].dead_letters)"
        )

    def of_backfills(self, topic: str) -> dict[str, int]:
        found: Counter[str] = Counter()
        for member in self._members.up():
            found.update(member.platform.dead_letters.of_backfills(topic))
        return dict(found)

    def list(
        self, topic: str, letters: LetterFilter | None = None, *, limit: int = 100, redriven: bool | None = None
    ) -> list_of[DeadLetter]:
        """The oldest of all shards that are up, each with its shard."""
        _check_ids(letters)
        found: list_of[DeadLetter] = []
        for member in self._members.up():
            with self._members.using(member):
                listed = member.platform.dead_letters.list(topic, letters, limit=limit, redriven=redriven)
            for letter in listed:
                letter.shard = member.name
            found += listed
        return sorted(found, key=lambda letter: letter.buffered_at)[:limit]


def _check_ids(letters: LetterFilter | None) -> None:
    if letters is not None and (letters.ids is not None or letters.after or letters.upto is not None):
        raise ValidationError(
            "offsets of dead letters mean others on each shard: name one (--shard NAME, "
            "platform.shards[i].dead_letters), or say otherwise which are meant"
        )


@checked
class ShardedRepartitioner(Repartitioner):
    """A `Repartitioner` over shards: keys stay on their shard, and in order there, so one after the other will do."""

    def __init__(self, members: Members) -> None:
        self._members = members

    def repartition(
        self,
        topic: str,
        partitions: int,
        *,
        finish: Callable[[], object] = lambda: None,
        patience: float = PATIENCE_SECONDS,
    ) -> Repartitioning | None:
        """As on one database, on all shards; gives what it came to on the last that changed.

        What was published over several shards before comes first, on all of them: `DatabaseBusyError`, and nothing
        changed, where it is not finished in `patience` seconds. Where it fails in between, some have changed: do it
        again.
        """

        def finish_all() -> None:
            finish()
            self._finish()

        begun = False

        def change(member: Member) -> Repartitioning | None:
            nonlocal begun
            if not begun:
                self._await_finished(topic, patience)
                begun = True
            return member.platform.repartitioner.repartition(topic, partitions, finish=finish_all, patience=patience)

        done = everywhere(self._members, change)
        return next((change for change in reversed(list_of(done.values())) if change is not None), None)

    def _finish(self) -> list_of[Unfinished]:
        decisions = Decisions(
            lambda: {member.name: member.platform for member in self._members.known() if member.down is None}
        )
        return decisions.finish(abandoned_after=ABANDONED_SECONDS)

    def _await_finished(self, topic: str, patience: float) -> None:
        """See to it that what has been announced until now is finished, or given up."""
        trying = Patience(patience)
        left = self._finish()
        # Those that are announced from now on are waited for by each attempt.
        known = {each.id for each in left}
        while left:
            if not trying.lasts():
                raise DatabaseBusyError(
                    f"topic {topic!r} keeps its partitions on all shards: {'; '.join(map(str, left))}; try again when "
                    "`eventsql shard status` shows nothing that is not finished"
                )
            left = [each for each in self._finish() if each.id in known]


class ShardedLag:
    """Lag over shards; a shard that is down is shown as such."""

    def __init__(self, members: Members, gates: Gates) -> None:
        self._members = members
        self._gates = gates

    def read(self, topic: str | None) -> list[ConsumerLag]:
        """By topic, consumer, shard and partition. Raises `TopicNotFoundError`, and where no shard is up."""
        # Before anything is read, so that what is let go just now does not count as held back.
        held = {(each.topic, each.consumer, each.shard): each for each in self._gates.settle()}
        lags: list[ConsumerLag] = []
        for member in self._members.up():
            try:
                with self._members.using(member):
                    lags += [replace(lag, shard=member.name) for lag in member.platform.lag(topic)]
            except TopicNotFoundError:
                if member.active:
                    raise
        for member in self._members.known():
            if member.down is not None:
                lags += self._unreachable(member, lags)
        return sorted(
            (self._held_back(lag, held.get((lag.topic, lag.consumer, lag.shard or ""))) for lag in lags),
            key=lambda lag: (lag.topic, lag.consumer, lag.shard or "", lag.partition),
        )

    def _unreachable(self, member: Member, others: Iterable[ConsumerLag]) -> list[ConsumerLag]:
        """The partitions that a shard must have, because the others have them; how far they are is not known."""
        partitions = sorted({(lag.topic, lag.consumer, lag.partition) for lag in others})
        down = member.seconds_down
        return [
            ConsumerLag(
                topic, consumer, partition, 0, down, 0, 0, 0, LagCause.UNREACHABLE, str(member.down), member.name
            )
            for topic, consumer, partition in partitions
        ]

    def _held_back(self, lag: ConsumerLag, held: HeldBack | None) -> ConsumerLag:
        if held is None or lag.cause is not LagCause.HELD_BACK:
            return lag
        down = {member.name for member in self._members.known() if member.down is not None}
        names = ", ".join(f"{name} (down)" if name in down else name for name in held.waits_for)
        return replace(lag, detail=f"until it has consumed what was before on {names}")

    def buffered(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for member in self._members.up():
            with self._members.using(member):
                for topic, events in member.platform.buffered().items():
                    counts[topic] = counts.get(topic, 0) + events
        return counts
