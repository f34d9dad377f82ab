"""What a platform on shards offers is what one on a single database does, under the same names."""

from __future__ import annotations

import inspect

import pytest

from eventsql_orchestration import EventSQL
from eventsql_orchestration.errors import ConfigurationError, EventSQLError
from eventsql_orchestration.log.asynchronous import AsyncPublisher
from eventsql_orchestration.log.buffered import BufferedPublisher
from eventsql_orchestration.log.consumer import Consumers
from eventsql_orchestration.log.dead_letters import DeadLetters
from eventsql_orchestration.log.publisher import Publisher
from eventsql_orchestration.log.registry import Registry
from eventsql_orchestration.log.repartition import Repartitioner
from eventsql_orchestration.log.retention import Retainer
from eventsql_orchestration.log.running import Consumption
from eventsql_orchestration.log.seek import Seeker
from eventsql_orchestration.log.transfer import Transfer
from eventsql_orchestration.queue import Queue
from eventsql_orchestration.sharded import ShardedEventSQL, buffered, consumers, operations, publisher, registry

PARTS = [
    (Publisher, publisher.ShardedPublisher),
    (Registry, registry.ShardedRegistry),
    (Consumers, consumers.ShardedConsumers),
    (Consumption, consumers.ShardedConsumption),
    (Transfer, consumers.ShardedTransfer),
    (Retainer, consumers.ShardedRetainer),
    (Seeker, operations.ShardedSeeker),
    (DeadLetters, operations.ShardedDeadLetters),
    (Repartitioner, operations.ShardedRepartitioner),
    (BufferedPublisher, buffered.ShardedBufferedPublisher),
    (EventSQL, ShardedEventSQL),
]

INHERITED = {
    (DeadLetters, "blocking"): "is what `accepts` makes of it",
    (AsyncPublisher, "publish"): "is `enqueue`, awaited",
}


@pytest.mark.parametrize(("single", "sharded"), [*PARTS, (AsyncPublisher, buffered.ShardedAsyncPublisher)])
def test_every_public_method_of_one_database_is_there_for_several(single: type, sharded: type) -> None:
    public = {
        name
        for name, member in vars(single).items()
        if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, property))
    }
    missing = {name for name in public - vars(sharded).keys() if (single, name) not in INHERITED}
    assert not missing, f"{sharded.__name__} would run {missing} of a single database"


def test_one_url_is_a_platform_on_one_database_and_nothing_else(dsn: str) -> None:
    with EventSQL(dsn) as platform:
        assert type(platform) is EventSQL
        assert platform.shards == (platform,)
        assert platform.shard is None
        assert platform.shard_of("any key") is platform


def test_what_is_of_one_database_says_where_to_find_it() -> None:
    platform = EventSQL("postgresql://one/x", "postgresql://other/x")
    for name in ("claims", "database", "layouts", "listener", "notifier", "reader"):
        with pytest.raises(EventSQLError, match=rf"platform\.shards\[i\]\.{name}"):
            getattr(platform, name)
    with pytest.raises(EventSQLError, match="a queue, an event store and views live on one of them"):
        Queue(platform.database, "commands")
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = platform.nonsense  # type: ignore[attr-defined]


def test_a_class_of_a_users_own_does_not_lose_urls_silently() -> None:
    class Mine(EventSQL):
        pass

    with pytest.raises(ConfigurationError, match="Mine is on one database"):
        Mine("postgresql://one/x", "postgresql://other/x")


def test_several_urls_in_one_text_are_no_database_and_their_passwords_stay_secret() -> None:
    with pytest.raises(ConfigurationError, match="several database URLs") as refused:
        EventSQL("postgresql://u:secret@one/x postgresql://u:secret@other/x")
    assert "secret" not in str(refused.value)
