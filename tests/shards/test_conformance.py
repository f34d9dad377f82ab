"""A platform over shards has the same public names as a platform on one database."""

from __future__ import annotations

import inspect

import pytest

from eventsql_orchestration import EventSQL
from eventsql_orchestration.client import admin, buffered, consumers, dead_letters, publisher, registry
from eventsql_orchestration.consuming.consumers import Consumers
from eventsql_orchestration.consuming.dead_letters import DeadLetters
from eventsql_orchestration.consuming.worker_pool import Consumption
from eventsql_orchestration.errors import ConfigurationError, EventSQLError, SingleShardError
from eventsql_orchestration.maintenance.repartitioning import Repartitioner
from eventsql_orchestration.maintenance.retention import Retainer
from eventsql_orchestration.maintenance.seek import Seeker
from eventsql_orchestration.publishing.async_publisher import AsyncCollector
from eventsql_orchestration.publishing.buffered import Collector
from eventsql_orchestration.publishing.publisher import Publisher
from eventsql_orchestration.publishing.transfer import Transfer
from eventsql_orchestration.queue import Queue
from eventsql_orchestration.topics.registry import Registry

PARTS = [
    (Publisher, publisher.ClusterPublisher),
    (Registry, registry.ClusterRegistry),
    (Consumers, consumers.ClusterConsumers),
    (Consumption, consumers.ClusterConsumption),
    (Transfer, consumers.ClusterTransfer),
    (Retainer, admin.ClusterRetainer),
    (Seeker, admin.ClusterSeeker),
    (DeadLetters, dead_letters.ClusterDeadLetters),
    (Repartitioner, admin.ClusterRepartitioner),
    (Collector, buffered.BufferedPublisher),
    (AsyncCollector, buffered.AsyncPublisher),
]

OF_A_SHARD = {
    (Consumption, "start"): "the consumers of a shard call it",
    (Transfer, "close"): "a shard closes its own",
    (Publisher, "publish_batch"): "each shard has lanes of its own",
    (Publisher, "hashes_keys"): "the lanes of a shard ask it",
    (Registry, "compressions"): "servers may be built with others",
    (Registry, "known"): "the publisher of a shard asks it",
    (DeadLetters, "blocking"): "consumption on a shard asks it",
    (DeadLetters, "bury"): "consumption on a shard gives the event up in its transaction",
}

ONLY_OF_A_SHARD = {
    (Publisher, "publish"): {"placed"},
    (Publisher, "publish_all"): {"placed"},
    (DeadLetters, "topic_of"): {"connection"},
    (DeadLetters, "accepts"): {"connection"},
    (Transfer, "run"): {"uncommitted"},
    (Transfer, "run_once"): {"deadline", "retry_held"},
    (Seeker, "execute"): {"choose"},
    (Repartitioner, "repartition"): {"finish"},
}
"""Parameters that only the other parts of a shard give."""


@pytest.mark.parametrize(("single", "over_several"), PARTS)
def test_every_public_method_of_one_database_is_there_for_several(single: type, over_several: type) -> None:
    public = {
        name: member
        for name, member in vars(single).items()
        if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, property))
    }
    for name, member in public.items():
        if (single, name) in OF_A_SHARD:
            continue
        assert name in vars(over_several)
        if inspect.isfunction(member):
            parameters = inspect.signature(member).parameters.keys() - ONLY_OF_A_SHARD.get((single, name), set())
            assert inspect.signature(vars(over_several)[name]).parameters.keys() == parameters


def test_one_url_is_a_platform_on_one_database_and_nothing_else(dsn: str) -> None:
    with EventSQL(dsn) as platform:
        (shard,) = platform.shards
        assert shard.name is None
        assert platform.shard_of("any key") is shard


def test_the_error_for_an_attribute_of_one_database_says_where_to_find_it() -> None:
    platform = EventSQL("postgresql://one/x", "postgresql://other/x")
    for name in ("claims", "database", "layouts", "listener", "reader"):
        with pytest.raises(EventSQLError, match=rf"platform\.shards\[i\]\.{name}"):
            getattr(platform, name)
    with pytest.raises(SingleShardError):
        Queue(platform.database, "commands")


def test_several_urls_in_one_text_are_no_database_and_their_passwords_stay_secret() -> None:
    with pytest.raises(ConfigurationError, match="several database URLs") as refused:
        EventSQL("postgresql://u:secret@one/x postgresql://u:secret@other/x")
    assert "secret" not in str(refused.value)
