"""Finish publications over several shards: publish each part of a decided publication, and no other part.

The writer announces a publication on the shard that decides it, before it prepares any part. The announcement stays
until all parts are published. So the announcement tells the fate of a part. If the publication is decided, the part is
published. If it is only announced, the part may still be published. If the announcement is gone, the publication was
given up, or this part is published. To give up a publication, a process deletes its announcement, unless it is decided.
Then no process can decide the publication any more.

A batch that was given up may be tried again, with other events, and may then have no part here. An open part may belong
to a publication that was given up, or may have come back with a backup of this database. Only the record of the batch
tells the two apart: it names the publication that took place. Older versions of this package recorded no name. Then the
part was given up if another part of the batch is published here, because a batch takes place once, with one part on
each shard.

A decided part is published before the placement of its events changes: no shard is added and no topic is repartitioned
while parts are open (`publishing/two_phase_participant.py`).
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import psycopg

from eventsql_orchestration.boundary import checked
from eventsql_orchestration.errors import EventSQLError
from eventsql_orchestration.publishing.two_phase_participant import (
    FORGET_SECONDS,
    Announcement,
    PublicationPart,
    TwoPhaseParticipant,
)
from eventsql_orchestration.shards.shard import Shard
from eventsql_orchestration.validation import Duration, in_seconds

logger = logging.getLogger(__name__)

ABANDONED_SECONDS: Final = 600.0
"""Seconds until a publication that is announced and not decided is given up, even if its owner is still at work.
Normally the announcement and the decision are seconds apart."""

SUPERSEDED_SECONDS: Final = 5.0
"""As `ABANDONED_SECONDS`, for a fence and for a repartitioning, which make the publication impossible in any case: its
events were placed by the definition before."""

_TIMEOUT: Final = 0.1
"""Seconds to wait for another process that publishes or decides a part."""


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A publication over several shards that is not finished, and why.

    `decided` says whether it takes place; it is None while the shard that decides cannot be asked. `shards` are the
    known shards on which its events are not published yet.
    """

    id: uuid.UUID
    writer: str
    batch: int
    decided: bool | None
    reason: str
    shards: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"batch {self.batch} of writer {self.writer!r} is not finished: {self.reason}"


@checked
class TwoPhaseCoordinator:
    """Finishes publications over several shards. Any process may call it."""

    def __init__(self, shards: Callable[[], Mapping[str, Shard]]) -> None:
        """`shards` gives the shards that can be reached, by name."""
        self._shards = shards

    def finish(
        self, *, timeout: Duration = _TIMEOUT, abandoned_after: Duration = ABANDONED_SECONDS
    ) -> list[Unfinished]:
        """Publish every decided part; give up each undecided publication whose owner has ended.

        If the owner is still at work, the publication is given up `abandoned_after` seconds after its announcement.
        Gives the publications that could not be finished: a shard is missing, or another process is at work, after a
        wait of `timeout` seconds. Raises nothing for a shard that fails.
        """
        timeout = in_seconds(timeout)
        abandoned_after = in_seconds(abandoned_after)
        shards = {name: TwoPhaseParticipant(platform.database) for name, platform in self._shards().items()}
        left: dict[uuid.UUID, Unfinished] = {}
        for name, parts in shards.items():
            try:
                announced = parts.announced()
            except (EventSQLError, psycopg.Error) as error:
                logger.info("shard %s is not asked for publications to finish: %s", name, error)
                continue
            for each in announced:
                unfinished = self._settle(each, name, shards, timeout, abandoned_after)
                if unfinished is not None:
                    left[each.id] = unfinished
        for name, parts in shards.items():
            try:
                for part in parts.open():
                    if part.id not in left and (reason := _look(part, parts, shards, timeout)) is not None:
                        left[part.id] = Unfinished(part.id, part.writer, part.batch, None, reason, (name,))
            except (EventSQLError, psycopg.Error) as error:
                logger.info("shard %s is not asked for parts of publications: %s", name, error)
        return list(left.values())

    def _settle(
        self, publication: Announcement, decider: str, shards: Mapping[str, TwoPhaseParticipant],
        timeout: float, age: float,
    ) -> Unfinished | None:  # fmt: skip
        """Finish a publication or give it up; if neither works, gives the unfinished publication with the reason."""

        def left(reason: str, names: Iterable[str] = publication.shards) -> Unfinished:
            return Unfinished(
                publication.id, publication.writer, publication.batch, publication.decided, reason, tuple(names)
            )

        try:
            if not publication.decided:
                decided = _give_up(publication, decider, shards[decider], timeout, age)
                if decided is None:
                    return None
                if not decided:
                    by = "" if publication.owner is None else f" by {publication.owner}"
                    return left(f"it is being published{by}, for {publication.age:.0f} seconds now")
                publication = replace(publication, decided=True)
            # Publish on each shard, even if another shard fails.
            reasons = {name: _publish(publication, name, shards.get(name), timeout) for name in publication.shards}
            failed = {name: reason for name, reason in reasons.items() if reason is not None}
            if failed:
                return left("; ".join(failed.values()), failed)
        except (EventSQLError, psycopg.Error) as error:
            return left(str(error))
        try:
            shards[decider].finish(publication.id)
        except (EventSQLError, psycopg.Error) as error:
            return left(str(error), ())
        return None


def _give_up(
    publication: Announcement, decider: str, parts: TwoPhaseParticipant, timeout: float, age: float
) -> bool | None:
    """Give up a publication whose owner has ended or takes too long; otherwise, gives whether it is decided by now.

    None if the publication is over.
    """
    over = publication.deserted or publication.age >= age
    if over and parts.give_up(publication.id, timeout=timeout):
        logger.warning(
            "batch %d of writer %r, announced %.0f seconds ago on shard %r, is given up and not published: %s",
            publication.batch, publication.writer, publication.age, decider,
            f"{publication.owner} has ended" if publication.deserted else "nobody has decided it",
        )  # fmt: skip
        return None
    # Meanwhile its owner may have decided it and ended, or another process may have given it up.
    return parts.is_decided(publication.id)


def _publish(publication: Announcement, name: str, parts: TwoPhaseParticipant | None, timeout: float) -> str | None:
    """Publish the part of a shard; if that fails, gives the reason."""
    if parts is None:
        return f"shard {name!r} cannot be reached"
    try:
        # The record of an older part may have been deleted after its publication.
        if not parts.publish_decided(publication.id, timeout=timeout) and publication.age < FORGET_SECONDS:
            logger.error(
                "batch %d of writer %r is published without its events on shard %r, which has lost them, as a promoted "
                "standby that lacked the newest commits: publish these events again",
                publication.batch, publication.writer, name,
            )  # fmt: skip
    except (EventSQLError, psycopg.Error) as error:
        return f"shard {name!r}: {error}"
    return None


def _look(
    part: PublicationPart, parts: TwoPhaseParticipant, shards: Mapping[str, TwoPhaseParticipant], timeout: float
) -> str | None:
    """Give up a part whose publication was given up; if the part stays, gives the reason."""
    decider = shards.get(part.decider)
    if decider is None:
        return f"shard {part.decider!r}, which knows whether it takes place, cannot be reached"
    try:
        if decider.is_decided(part.id) is not None:
            return "it is being published"
        took_place = decider.took_place(part)
        if took_place is None:
            took_place = not parts.was_replaced(part)
        # A part is published before its announcement goes. So ask whether it is open after asking for the announcement.
        if took_place and parts.is_open(part.id):
            return (
                f"shard {part.decider!r} has recorded it as published, but its part {part.id} here is not, as after a "
                "restore of one of the databases: compare the events, and delete its row of spark_part if they are here"
            )
        if parts.give_part_up(part.id, timeout=timeout):
            logger.warning(
                "a part of batch %d of writer %r is given up: shard %r does not know its publication",
                part.batch, part.writer, part.decider,
            )  # fmt: skip
    except (EventSQLError, psycopg.Error) as error:
        return str(error)
    return None
