"""The fault run in small: processes are killed and the server restarts while keyed events flow; then all is there once.

`SEED` decides what happens when, by how far the run has come; another seed is another run.
"""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING

from eventsql_orchestration import Consumer, EventSQL, Topic
from eventsql_orchestration.database.embedded import EmbeddedPostgres
from eventsql_orchestration.errors import DatabaseUnavailableError

if TYPE_CHECKING:
    from tests.log.conftest import Spawn, Until, Worker

SEED = 20250613
PUBLISHERS = 3
EVENTS = 2_000
KEYS = 7
PARTITIONS = 4
TOTAL = PUBLISHERS * EVENTS


class Cast:
    """The processes of a run; one that is killed is followed by another in its role."""

    def __init__(self, spawn: Spawn) -> None:
        self._spawn = spawn
        self._roles: dict[str, tuple[object, ...]] = {
            **{f"publisher {n}": ("publish", f"p{n}", EVENTS, KEYS) for n in range(PUBLISHERS)},
            **{f"transfer {n}": ("transfer", batch) for n, batch in enumerate((25, 400))},
            **{f"consumer {n}": ("consume", "mailer") for n in range(2)},
            **{f"claims {n}": ("consume_claims", "fares", f"owner {n}") for n in range(2)},
        }
        self._playing = {name: spawn(*role) for name, role in self._roles.items()}

    def names(self, kind: str) -> list[str]:
        return [name for name in self._roles if name.startswith(kind)]

    def kill_and_follow(self, name: str) -> None:
        self._playing[name].kill()
        self._playing[name] = self._spawn(*self._roles[name])

    def published(self) -> bool:
        return not any(self._playing[name].running for name in self.names("publisher"))

    def end(self) -> list[Worker]:
        for worker in self._playing.values():
            if worker.running:
                worker.tell("end")
        return list(self._playing.values())


def counts(platform: EventSQL) -> dict[str, int]:
    """How many effects each consumer has committed."""
    try:
        with platform.database.connection() as connection:
            return dict(connection.execute("SELECT consumer, count(*) FROM effects GROUP BY consumer").fetchall())
    except DatabaseUnavailableError:
        return {}


def both_consumed(platform: EventSQL, events: int) -> bool:
    consumed = counts(platform)
    return len(consumed) == 2 and min(consumed.values()) >= events


def effects_of(platform: EventSQL, consumer: str) -> list[tuple[str, int, int, int]]:
    """Key, number, partition and offset of each event, in the order in which the consumer committed them."""
    with platform.database.connection() as connection:
        return connection.execute(
            "SELECT key, convert_from(value, 'UTF8')::int, partition, event_id FROM effects "
            "WHERE consumer = %s ORDER BY id",
            (consumer,),
        ).fetchall()


def check(effects: list[tuple[str, int, int, int]]) -> None:
    """None lost, none repeated, each key in one partition and in the order in which it was published."""
    expected = {(f"p{publisher}-{n % KEYS}", n) for publisher in range(PUBLISHERS) for n in range(EVENTS)}
    assert len(effects) == len(expected)
    assert {(key, number) for key, number, _, _ in effects} == expected
    of_key: dict[str, list[tuple[int, int, int]]] = {}
    for key, number, partition, event_id in effects:
        of_key.setdefault(key, []).append((number, partition, event_id))
    for seen in of_key.values():
        assert [number for number, _, _ in seen] == sorted(number for number, _, _ in seen)
        assert [event_id for _, _, event_id in seen] == sorted(event_id for _, _, event_id in seen)
        assert len({partition for _, partition, _ in seen}) == 1


def test_nothing_is_lost_repeated_or_reordered_though_processes_are_killed_and_the_server_restarts(
    platform: EventSQL, server: EmbeddedPostgres, spawn: Spawn, until: Until
) -> None:
    platform.registry.register_topic(Topic("orders", PARTITIONS))
    for consumer in ("mailer", "fares"):
        platform.registry.register_consumer(Consumer("orders", consumer, partitioned=True))
    with platform.database.connection() as connection:
        connection.execute(
            "CREATE TABLE effects (id bigserial PRIMARY KEY, consumer text, partition int, key text, event_id bigint, "
            "value bytea)"
        )
        connection.execute("CREATE TABLE progress (publisher text PRIMARY KEY, published int)")
        connection.execute("INSERT INTO progress SELECT 'p' || n, 0 FROM generate_series(0, %s) n", (PUBLISHERS - 1,))
    drawn = random.Random(SEED)
    cast = Cast(spawn)
    kinds = ("publisher", "transfer", "consumer", "claims") * 2
    faults = [*(drawn.choice(cast.names(kind)) for kind in kinds), "server"]
    drawn.shuffle(faults)
    for at, fault in zip(sorted(drawn.sample(range(TOTAL // 20, TOTAL // 2), len(faults))), faults, strict=True):
        until(partial(both_consumed, platform, at))
        if fault == "server":
            server.stop(mode="immediate")
            server.start()
        else:
            cast.kill_and_follow(fault)
    until(cast.published)
    until(lambda: counts(platform) == {"mailer": TOTAL, "fares": TOTAL})
    for worker in cast.end():
        assert worker.end() == 0
    check(effects_of(platform, "mailer"))
    check(effects_of(platform, "fares"))
    assert platform.transfer.run_once() == {}
    assert [lag.events for lag in platform.lag()] == [0] * 2 * PARTITIONS
    assert sum(state.consumed_events for state in platform.registry.consumers()) == 2 * TOTAL
