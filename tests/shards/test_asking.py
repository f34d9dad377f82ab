"""Shards whose servers take connections and say nothing: they are asked at once, and not for long."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from psycopg import errors
from psycopg.conninfo import conninfo_to_dict

from eventsql_orchestration import EventSQL, Publication, Topic
from eventsql_orchestration.errors import (
    DatabaseBusyError,
    DatabaseUnavailableError,
    ShardSetError,
    ShardUnavailableError,
)
from eventsql_orchestration.shards import health
from tests.interrupting import interrupted
from tests.shard_keys import shard_of_key
from tests.shards.adding import KEYS
from tests.shards.conftest import Databases, Open, Until
from tests.waiting import PATIENCE

NAMES = ["shard-1", "shard-2", "shard-3"]


class Silent:
    """A server that accepts connections and never answers; its clients wait for a minute."""

    def __init__(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._listening.setblocking(False)
        self._connections: list[socket.socket] = []
        self.url = f"postgresql://nobody@127.0.0.1:{self._listening.getsockname()[1]}/silent?connect_timeout=60"

    def asked(self) -> bool:
        """Whether somebody has connected."""
        with suppress(BlockingIOError):
            self._connections.append(self._listening.accept()[0])
        return bool(self._connections)

    def is_awaited(self) -> bool:
        """Whether the first client still waits for an answer."""
        self._connections[0].setblocking(False)
        try:
            while self._connections[0].recv(1024):
                pass
        except BlockingIOError:
            return True
        return False

    def close(self) -> None:
        if self._listening.fileno() >= 0:
            self.asked()
        self._listening.close()
        for connection in self._connections:
            connection.close()


@pytest.fixture
def silent() -> Iterator[list[Silent]]:
    servers = [Silent(), Silent()]
    yield servers
    for server in servers:
        server.close()


@pytest.fixture
def dsns(databases: Databases) -> list[str]:
    """Three shards with a topic, by their names."""
    dsns = databases(3)
    with EventSQL(*dsns, transfer=False) as platform:
        platform.registry.register_topic(Topic("orders"))
        named = {str(shard.name): shard.database.dsn for shard in platform.shards}
    return [named[name] for name in NAMES]


def states(platform: EventSQL) -> list[str]:
    return [each.state for each in platform.status()]


def test_shards_that_do_not_answer_are_asked_side_by_side(
    dsns: list[str], silent: list[Silent], opened: Open, until: Until
) -> None:
    platform = opened(dsns[0], *(server.url for server in silent))
    opening = threading.Thread(target=platform.open)
    opening.start()
    # One after the other, the second would not be asked before the first has been waited for.
    first, second = silent
    until(first.asked)
    until(second.asked)
    for server in silent:
        server.close()
    opening.join()
    assert sorted(states(platform)) == ["down", "down", "takes events"]


def test_a_shard_that_does_not_answer_in_time_is_down_and_the_others_go_on(
    dsns: list[str], silent: list[Silent], opened: Open, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The others have as long as they take.
    monkeypatch.setattr(health, "_bound", lambda asked: 1.0 if asked.url.database == "silent" else PATIENCE)
    platform = opened(*dsns[:2], silent[0].url)
    platform.open()
    until(silent[0].asked)
    assert silent[0].is_awaited(), "it was not waited for until the connection failed"
    keys = {name: next(key for key in KEYS if shard_of_key(key, NAMES) == name) for name in NAMES}
    platform.publisher.publish_all(Publication("orders", b"1", key=keys[name]) for name in NAMES[:2])
    with pytest.raises(ShardUnavailableError, match=r"'shard-3' is down: .* has not answered for 1 seconds"):
        platform.publisher.publish(Publication("orders", b"1", key=keys["shard-3"]))


def test_a_shard_that_this_process_has_no_connection_left_for_is_not_down(
    dsns: list[str], opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform = opened(*dsns)
    platform.open()
    database = platform.shards[0].database
    with ExitStack() as stack, monkeypatch.context() as patched:
        patched.setattr(health, "_bound", lambda asked: 0.2 if asked is database else PATIENCE)
        while not database.exhausted:
            stack.enter_context(database.connection())
        with pytest.raises(DatabaseBusyError, match="every connection of this process"):
            platform._cluster.refresh()
        assert platform._cluster.named("shard-1").down is None
    platform._cluster.refresh()
    assert states(platform) == ["takes events"] * 3


def test_a_shard_is_asked_at_each_host_of_its_url(dsns: list[str], silent: list[Silent], opened: Open) -> None:
    own, other = conninfo_to_dict(dsns[2]), conninfo_to_dict(silent[0].url)
    hosts = f"host={other['host']},{own['host']}&port={other['port']},{own['port']}&connect_timeout=2"
    platform = opened(*dsns[:2], f"postgresql://{own['user']}:{own.get('password', '')}@/{own['dbname']}?{hosts}")
    platform.open()
    assert silent[0].asked()
    assert [member.down for member in platform._cluster.all()] == [None] * 3
    bounds = [health._bound(platform._cluster.named(name).database) - health.ANSWER_SECONDS for name in NAMES]
    assert bounds == [0, 0, 2]


def test_the_hosts_of_a_url_may_share_a_port(opened: Open) -> None:
    platform = opened("postgresql://user@/one?host=a,b&port=5432", "postgresql://user@/two?host=c&port=5432")
    alone, shared = (health._bound(shard.database) for shard in reversed(platform.shards))
    assert (alone, shared) == (health.ANSWER_SECONDS, health.ANSWER_SECONDS + 10)


def test_a_shard_that_no_thread_can_look_after_is_not_left_down(
    databases: Databases, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    platform = opened(*databases(2)).open()
    lost, shard = DatabaseUnavailableError("gone"), platform.shards[0]
    watching = platform._cluster.health.watching
    with monkeypatch.context() as patch, pytest.raises(RuntimeError), watching(shard):
        patch.setattr(health, "start_thread", refuse)
        raise lost
    assert shard.down is None
    with pytest.raises(DatabaseUnavailableError), watching(shard):
        raise lost
    assert shard.down is lost


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The threads that would look after shards that are down: what they would be called with."""
    probes: list[tuple[Any, ...]] = []
    monkeypatch.setattr(health, "start_thread", lambda _name, _function, *given: probes.append(given))
    return probes


def test_a_shard_that_cannot_be_reached_is_down_until_it_answers(probes: list[tuple[Any, ...]]) -> None:
    error = DatabaseUnavailableError("gone")
    shard: Any = Mock(down=None, unavailable=lambda: ShardUnavailableError("down", shard="shard-1"))
    shard.database.connection.side_effect = error
    found = health.Health(wait=False, on_return=Mock())
    for _ in range(2):
        with pytest.raises(ShardUnavailableError):
            found.reach(shard)
        assert shard.down is error
    # Its thread asks it, and nobody else.
    assert shard.database.connection.call_count == len(probes) == 1


def test_a_shard_that_is_lost_twice_is_looked_after_by_one_thread(probes: list[tuple[Any, ...]]) -> None:
    shard, found = Mock(down=None), health.Health(wait=False, on_return=Mock())
    first = DatabaseUnavailableError("gone")
    found.lose(shard, first)
    found.lose(shard, DatabaseUnavailableError("gone again"))
    assert shard.down is first
    assert len(probes) == 1


@pytest.mark.parametrize("sqlstate", ["25P03", "25P04"])
def test_a_shard_that_ended_a_transaction_which_idled_or_took_too_long_is_not_down(
    probes: list[tuple[Any, ...]], sqlstate: str
) -> None:
    shard, found = Mock(down=None), health.Health(wait=False, on_return=Mock())
    with pytest.raises(DatabaseUnavailableError), found.watching(shard):
        raise DatabaseUnavailableError("ended a transaction") from errors.lookup(sqlstate)()
    assert (shard.down, probes) == (None, [])


def test_a_thread_that_outlives_the_close_counts_no_shard_as_down(probes: list[tuple[Any, ...]]) -> None:
    shard, found = Mock(down=None), health.Health(wait=False, on_return=Mock())
    error = DatabaseUnavailableError("gone")
    found.lose(shard, error)
    ((_, stop),) = probes
    found.close([shard])
    found._note(shard, error, stop)
    assert shard.down is None


@pytest.mark.parametrize(
    "other", [{"name": "shard-1"}, {"name": None}, {"set": "another"}], ids=["its neighbour", "no shard", "another set"]
)
def test_a_shard_does_not_come_back_as_another_database(
    databases: Databases, opened: Open, other: dict[str, str | None]
) -> None:
    platform = opened(*databases(2)).open()
    shard = platform.shards[1]
    state = shard.store.state()
    with pytest.raises(ShardSetError):
        platform._cluster._check_returned(shard, replace(state, **other))  # type: ignore[arg-type]
    assert shard.name == "shard-2"
    platform._cluster._check_returned(shard, state)


def test_ctrl_c_in_a_wait_for_a_shard_leaves_the_health_of_shards_to_other_threads() -> None:
    error = ShardUnavailableError("down", shard="shard-1")
    down: Any = SimpleNamespace(down=error, unavailable=lambda: error)

    def wait(found: health.Health) -> None:
        with suppress(ShardUnavailableError):
            found.reach(down, time.monotonic() + 0.01)
        found.close([])

    for after in count():
        found = health.Health(wait=True, on_return=lambda *_: None)
        goes_on = interrupted(after, partial(wait, found), module="threading.py")
        assert not found._lock.locked()
        closing = threading.Thread(target=found.close, args=[[]], daemon=True)
        closing.start()
        closing.join(PATIENCE)
        assert not closing.is_alive()
        if not goes_on:
            break
    assert after > 5
