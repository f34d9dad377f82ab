"""The plan of a fault run, by the seed alone: its publishers and other processes, and the time of each fault."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from eventsql_orchestration.model import Storage
from tests.log.verdict import CONSUMERS

SHARES: Final = {"single": 0.02, "small": 0.08, "outbox": 0.10, "buffered": 0.30, "straight": 0.50}
"""What each kind of publisher publishes of all events; each kind has two processes."""

SERVER: Final = "server"
PARTITIONS: Final = "partitions"
SHARD: Final = "shard"
FORM: Final = "form"
POOLER: Final = "pooler"
PROMOTION: Final = "promotion"


@dataclass(frozen=True, slots=True)
class Settings:
    """A run: how many events, in how many partitions, how many faults, and the seconds after which it is given up.

    `changes` are of the form of the topic's log.

    `shards` is how many there are from the beginning, each on a server of its own; `additions` are of further ones.
    `pooled`: the processes reach each server through a PgBouncer, which dies as often as servers do. `standby`: the
    only server has a synchronous standby, which is promoted once the server is lost for good.
    """

    events: int
    seed: int
    shards: int = 1
    partitions: int = 8
    kills: int = 100
    restarts: int = 10
    repartitionings: int = 10
    changes: int = 0
    additions: int = 0
    deadline: float = 1_200.0
    storage: Storage = "blocks"
    pooled: bool = False
    standby: bool = False
    consumers: Mapping[str, str] = field(default_factory=lambda: CONSUMERS)
    """The consumer of each role."""


@dataclass(frozen=True, slots=True)
class Player:
    """A process of the run: its role in `playing.py` and its arguments."""

    name: str
    kind: str
    role: str
    arguments: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens once so many events are acknowledged: the process of this name is killed, a server or its pooler
    breaks or is lost, the topic is repartitioned or gets another form, or a shard is added.
    """

    at: int
    name: str


@dataclass(frozen=True, slots=True)
class Publisher:
    """A publisher of the run: event `n` is number `n // keys` of its key `n % keys`."""

    name: str
    events: int
    keys: int

    def of_keys(self) -> dict[str, int]:
        """Its keys and how many events each gets."""
        return {f"{self.name}-{key}": len(range(key, self.events, self.keys)) for key in range(self.keys)}


def publishers(settings: Settings) -> list[Publisher]:
    found = []
    for kind, share in SHARES.items():
        for number in range(2):
            events = max(1, round(settings.events * share / 2))
            keys = max(20, min(400, settings.events // 100)) if kind == "buffered" else 50
            found.append(Publisher(f"{kind} {number}", events, keys))
    # Shares are rounded; the last one makes up for it.
    missing = settings.events - sum(publisher.events for publisher in found)
    last = found.pop()
    return [*found, Publisher(last.name, last.events + missing, last.keys)]


def players(settings: Settings, home: Path) -> list[Player]:
    most = max(40, min(1_000, settings.events // 200))
    return [
        *(
            Player(
                each.name, each.name.partition(" ")[0], "publish", (each.name, slot, home / "progress", settings.seed)
            )
            for slot, each in enumerate(publishers(settings))
        ),
        *(Player(f"transfer {number}", "transfer", "transfer", ()) for number in range(2)),
        *([Player("compact 0", "compact", "compact", ())] if settings.storage == "blocks" or settings.changes else ()),
        *(
            Player(f"{role} {number}", role, role, (consumer, most))
            for role, consumer in settings.consumers.items()
            for number in range(2)
        ),
        Player("follow 0", "follow", "follow", (home,)),
    ]


def faults(settings: Settings, names: Mapping[str, str]) -> list[Fault]:
    """The faults in order: every kind of process is killed about as often. `names` has the kind of each process."""
    drawn = random.Random(settings.seed)
    of_kind: dict[str, list[str]] = {}
    for name, kind in names.items():
        of_kind.setdefault(kind, []).append(name)
    kinds = itertools.islice(itertools.cycle(drawn.sample(sorted(of_kind), len(of_kind))), settings.kills)
    others = [SERVER] * settings.restarts + [PARTITIONS] * settings.repartitionings + [SHARD] * settings.additions
    others += [FORM] * settings.changes + [PROMOTION] * settings.standby
    if settings.pooled:
        others += [POOLER] * settings.restarts
    targets = [*(drawn.choice(of_kind[kind]) for kind in kinds), *others]
    drawn.shuffle(targets)
    moments = sorted(drawn.sample(range(settings.events // 50, settings.events * 9 // 10), len(targets)))
    return [Fault(at, name) for at, name in zip(moments, targets, strict=True)]
