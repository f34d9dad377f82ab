"""The fault run over shards: processes are killed while events flow and a shard is added; then all is there once."""

from __future__ import annotations

import random
from multiprocessing.process import BaseProcess
from typing import Any

import psycopg

from eventsql_orchestration import Consumer, EventSQL, Topic
from tests.shards import adding
from tests.shards.conftest import Databases, Until

EVENTS = 12
"""Of each of a publisher's keys."""

PUBLISHERS = ("web", "app")

SEED = 20261121

_TABLES = """
CREATE TABLE noted (key text, number integer, PRIMARY KEY (key, number));
CREATE TABLE effect (id bigserial, key text, number integer, at timestamptz);
"""


class _Crew:
    """Processes of the run, each of which is started again when it was killed."""

    def __init__(self, dsns: list[str]) -> None:
        self._roles: dict[str, tuple[Any, ...]] = {
            **{name: (adding.publish, dsns, name, EVENTS) for name in PUBLISHERS},
            "consumer 1": (adding.consume, dsns),
            "consumer 2": (adding.consume, dsns),
            "transfer": (adding.transfer, dsns),
        }
        self.running: dict[str, BaseProcess] = {}
        for name in self._roles:
            self.start(name)

    def start(self, name: str) -> None:
        role, *arguments = self._roles[name]
        seed = [random.randrange(10**6)] if role is adding.publish else []
        self.running[name] = adding.start(role, *arguments, *seed)

    def kill(self, name: str) -> None:
        self.running[name].kill()
        self.running[name].join(60)
        self.start(name)

    def close(self) -> None:
        for process in self.running.values():
            process.kill()
            process.join(60)


def test_nothing_is_lost_repeated_or_reordered_though_processes_are_killed_while_a_shard_is_added(
    databases: Databases, until: Until
) -> None:
    dsns = databases(3)
    for dsn in dsns:
        with psycopg.connect(dsn) as connection:
            connection.execute(_TABLES)
    with EventSQL(*dsns[:2], transfer=False) as platform:
        platform.registry.register_topic(Topic("orders", 3))
        platform.registry.register_consumer(Consumer("orders", "ledger", partitioned=True))
    adding.start(adding.add_shard, dsns[:2], dsns[2], "is prepared").join(60)
    total = EVENTS * len(PUBLISHERS) * len(adding.KEYS)
    chance = random.Random(SEED)
    crew = _Crew(dsns)
    try:
        steps = iter(["'shard-1' is fenced", "'shard-2' is fenced", "is active", None])
        for share in range(1, 7):
            until(lambda share=share: _count(dsns, "noted") >= total * share // 9)  # type: ignore[misc]
            crew.kill(chance.choice(list(crew.running)))
            if share <= 4:
                # The operator too, after each of his steps.
                adding.start(adding.add_shard, dsns[:2], dsns[2], next(steps)).join(60)
        until(lambda: _count(dsns, "effect") >= total)
        # What would come twice would come about now.
        until(lambda: not crew.running["web"].is_alive() and not crew.running["app"].is_alive())
    finally:
        crew.close()
    _verify(dsns, total)


def _count(dsns: list[str], table: str) -> int:
    count = 0
    for dsn in dsns:
        with psycopg.connect(dsn) as connection:
            row = connection.execute(f"SELECT count(*) FROM {table}").fetchone()
            assert row is not None
            count += row[0]
    return count


def _verify(dsns: list[str], total: int) -> None:
    effects: list[tuple[object, str, int, int]] = []
    for place, dsn in enumerate(dsns):
        with psycopg.connect(dsn) as connection:
            rows = connection.execute("SELECT at, key, number FROM effect").fetchall()
            effects += [(at, key, number, place) for at, key, number in rows]
    assert len(effects) == total
    of_keys: dict[str, list[tuple[int, int]]] = {}
    # One server, one clock.
    for _, key, number, place in sorted(effects, key=lambda effect: effect[0]):  # type: ignore[arg-type, return-value]
        of_keys.setdefault(key, []).append((number, place))
    moved = 0
    for key, found in of_keys.items():
        assert [number for number, _ in found] == list(range(EVENTS)), f"seed {SEED}: {key}"
        places = [place for _, place in found]
        assert places == sorted(places), "a key never comes back"
        moved += len(set(places)) > 1
    assert moved, "some keys moved in the middle of their events"
    with psycopg.connect(dsns[2]) as connection:
        held = connection.execute("SELECT count(*) FROM eventsql.consumer WHERE eql_until IS NOT NULL").fetchone()
        assert held == (0,)
