"""Finishing what was published over several shards: each part of a publication that is decided, and no other.

A publication is announced on the shard that decides it before any part of it is prepared, and its announcement stays
until all parts are published. So what a part becomes can be read there: decided, it is published; announced, it may
still be; gone, it was given up, or this part is published. Whoever gives a publication up deletes its announcement,
unless it is decided: then nobody can decide it any more.

A batch that was given up may be tried again, with other events, and so take place without a part here. Only the record
of the batch, which names the publication that took place, tells the part of one that was given up from one that came
back with a backup of this database. An older version of this package named none: then another part of the batch that
is published here tells, since a batch takes place once, with one part on each shard.

A part that is decided is published before anything changes by which its events were placed: neither a shard is added
nor a topic repartitioned while parts are open (`log/parts.py`).
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
from eventsql_orchestration.log.parts import Announcement, Part, Parts
from eventsql_orchestration.platform import EventSQL

logger = logging.getLogger(__name__)

ABANDONED_SECONDS: Final = 600.0
"""After so long, a publication that was announced and not decided is given up, though somebody is at it still: the two
are seconds apart."""

_PATIENCE: Final = 0.1
"""Seconds to wait for whoever publishes or decides a part just now."""


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A publication over several shards that is not finished, and why.

    `decided` says whether it takes place, which is not known (None) while the shard that decides cannot be asked.
    `shards` are those that its events are not published on yet, as far as they are known.
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
class Decisions:
    """Finishes publications over several shards, for whoever comes."""

    def __init__(self, shards: Callable[[], Mapping[str, EventSQL]]) -> None:
        """`shards` gives those that can be reached, by name."""
        self._shards = shards

    def finish(self, *, patience: float = _PATIENCE, abandoned_after: float = ABANDONED_SECONDS) -> list[Unfinished]:
        """Publish every part that is decided; give up what is not, and whose owner has ended.

        What its owner is still at is given up `abandoned_after` seconds after it was announced. Gives what could not be
        finished: because a shard is missing, or because somebody else is at it, for whom it waits `patience` seconds.
        Raises nothing for a shard that fails.
        """
        shards = {name: Parts(platform.database) for name, platform in self._shards().items()}
        left: dict[uuid.UUID, Unfinished] = {}
        for name, parts in shards.items():
            try:
                announced = parts.announced()
            except (EventSQLError, psycopg.Error) as error:
                logger.info("shard %s is not asked for publications to finish: %s", name, error)
                continue
            for each in announced:
                unfinished = self._settle(each, name, shards, patience, abandoned_after)
                if unfinished is not None:
                    left[each.id] = unfinished
        for name, parts in shards.items():
            try:
                for part in parts.open():
                    if part.id not in left and (reason := _look(part, parts, shards, patience)) is not None:
                        left[part.id] = Unfinished(part.id, part.writer, part.batch, None, reason, (name,))
            except (EventSQLError, psycopg.Error) as error:
                logger.info("shard %s is not asked for parts of publications: %s", name, error)
        return list(left.values())

    def _settle(
        self, publication: Announcement, decider: str, shards: Mapping[str, Parts], patience: float, age: float
    ) -> Unfinished | None:
        """Finish a publication or give it up; gives why it is neither."""

        def left(reason: str, names: Iterable[str] = publication.shards) -> Unfinished:
            return Unfinished(
                publication.id, publication.writer, publication.batch, publication.decided, reason, tuple(names)
            )

        try:
            if not publication.decided:
                decided = _give_up(publication, decider, shards[decider], patience, age)
                if decided is None:
                    return None
                if not decided:
                    by = "" if publication.owner is None else f" by {publication.owner}"
                    return left(f"it is being published{by}, for {publication.age:.0f} seconds now")
                publication = replace(publication, decided=True)
            # On each that takes it, whatever becomes of the others.
            reasons = {name: _publish(publication.id, name, shards.get(name), patience) for name in publication.shards}
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


def _give_up(publication: Announcement, decider: str, parts: Parts, patience: float, age: float) -> bool | None:
    """Give up a publication whose owner has ended, or is at it for too long; whether it is decided by now, else.

    None where it is over.
    """
    over = publication.deserted or publication.age >= age
    if over and parts.give_up(publication.id, patience=patience):
        logger.warning(
            "batch %d of writer %r was given up, %.0f seconds after it was announced on shard %r: %s, and nothing of "
            "it is published",
            publication.batch, publication.writer, publication.age, decider,
            f"{publication.owner} has ended" if publication.deserted else "nobody has decided it",
        )  # fmt: skip
        return None
    # Since it was looked at, its owner may have decided it, and ended for that; or somebody else has given it up.
    return parts.is_decided(publication.id)


def _publish(publication: uuid.UUID, name: str, parts: Parts | None, patience: float) -> str | None:
    """Publish the part of a shard; gives why it is not."""
    if parts is None:
        return f"shard {name!r} cannot be reached"
    try:
        parts.publish_decided(publication, patience=patience)
    except (EventSQLError, psycopg.Error) as error:
        return f"shard {name!r}: {error}"
    return None


def _look(part: Part, parts: Parts, shards: Mapping[str, Parts], patience: float) -> str | None:
    """Forget a part whose publication was given up; gives why another is left."""
    decider = shards.get(part.decider)
    if decider is None:
        return f"shard {part.decider!r}, which knows whether it takes place, cannot be reached"
    try:
        if decider.is_decided(part.id) is not None:
            return "it is being published"
        took_place = decider.took_place(part)
        if took_place is None:
            took_place = not parts.was_replaced(part)
        # What is published here was so before its announcement went, and is not open when that is asked after it.
        if took_place and parts.is_open(part.id):
            return (
                f"shard {part.decider!r} has recorded it as published and finished, and here its part {part.id} is "
                "not, as where one of them was restored from a backup: it is kept, and nothing published by it; "
                "compare the events, and delete its row of spark_part when they are there"
            )
        if parts.give_part_up(part.id, patience=patience):
            logger.warning(
                "a part of batch %d of writer %r was given up: shard %r knows nothing of this publication any more",
                part.batch, part.writer, part.decider,
            )  # fmt: skip
    except (EventSQLError, psycopg.Error) as error:
        return str(error)
    return None
