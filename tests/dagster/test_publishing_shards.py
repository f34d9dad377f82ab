"""The value of an asset is published over shards once, and its materialization names the offsets on each shard."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import dagster as dg
import pytest

from eventsql_orchestration import Consumer, EventSQL, Topic
from eventsql_orchestration.consuming.claims import Claim
from eventsql_orchestration.dagster import EventSQLResource, publish_events
from eventsql_orchestration.dagster.housekeeping.prune import delete_publications
from eventsql_orchestration.dagster.lineage.origin import Origin
from eventsql_orchestration.dagster.lineage.published import add_up
from eventsql_orchestration.errors import ClaimLostError
from eventsql_orchestration.orchestration.publication import publish
from eventsql_orchestration.publishing.two_phase_participant import TwoPhaseParticipant
from eventsql_orchestration.spark.commit_protocol import Publications
from tests.conftest import Administrator
from tests.dagster.conftest import NOWHERE, sql
from tests.shard_keys import shard_of_key

NAMES = ["shard-1", "shard-2"]
ROWS = [{"key": f"key {number}", "value": b"%d" % number} for number in range(40)]


@pytest.fixture
def eventsql(administrator: Administrator) -> Iterator[EventSQLResource]:
    """Two shards with a topic of 3 partitions."""
    with ExitStack() as stack:
        dsns = [stack.enter_context(administrator.copied()) for _ in NAMES]
        resource = EventSQLResource(dsn="\n".join(dsns))
        stack.callback(resource.platform.close)
        resource.platform.registry.register_topic(Topic("fares", 3))
        yield resource


def events(platform: EventSQL) -> dict[str, list[int]]:
    """The offsets of the events on each shard, where their keys belong."""
    platform.transfer.run_once()
    found = {}
    for shard in platform.shards:
        read = shard.reader.read("fares")
        assert {shard_of_key(str(event.key), NAMES) for event in read} == ({shard.name} if read else set())
        found[str(shard.name)] = [event.id for event in read]
    return found


def test_an_asset_publishes_once_in_a_run_and_says_where_on_each_shard(
    instance: dg.DagsterInstance, eventsql: EventSQLResource
) -> None:
    said: list[dict[str, Any]] = []

    @dg.asset
    def fares(context: dg.AssetExecutionContext) -> None:
        said.extend(publish_events(context, ROWS, eventsql=eventsql, topic="fares") for _ in range(2))

    assert dg.materialize([fares], instance=instance).success
    found = events(eventsql.platform)
    assert sum(map(len, found.values())) == len(ROWS)
    ranges: list[dict[str, Any]] = [
        {"shard": name, "first": min(offsets), "last": max(offsets)} for name, offsets in found.items()
    ]
    assert said[0] == said[1]
    assert said[0]["published events"] == len(ROWS)
    assert sorted(said[0]["published ranges"].value, key=lambda each: str(each["shard"])) == ranges
    assert "published first offset" not in said[0]
    assert said[0]["trace published"].startswith("eventsql --shard shard-")
    later = [{**each, "first": each["last"] + 1, "last": each["last"] + 3} for each in ranges]
    both = add_up([said[0], {**said[0], "published ranges": dg.MetadataValue.json(later)}], "fares")
    whole = [{**each, "last": each["last"] + 3} for each in ranges]
    assert (both["published events"], both["published ranges"].value) == (2 * len(ROWS), whole)


def test_a_repeated_run_learns_that_it_has_published_while_a_shard_is_down(eventsql: EventSQLResource) -> None:
    """The first shard, whose URL is the last one here, has the record."""
    origin = Origin("run", "run", "fares")
    publish(origin, ROWS, access=eventsql, topic="fares")
    down = EventSQLResource(dsn=f"{NOWHERE} {eventsql.shard('shard-1').database.dsn}")
    again = publish(origin, ROWS, access=down, topic="fares")
    assert (again.events, again.repeated) == (len(ROWS), True)
    down.platform.close()
    assert sum(map(len, events(eventsql.platform).values())) == len(ROWS)


def test_a_repeated_run_brings_the_events_that_were_decided_to_the_other_shards(
    eventsql: EventSQLResource, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die() -> None:
        raise KeyboardInterrupt

    def publish_part(*given: Any) -> None:
        publishing(*given)
        # The deciding transaction has committed by then, and this one has not.
        following: ExitStack = given[-1]
        following.callback(die)

    publishing = Publications._publish_part
    origin = Origin("run", "run", "fares")
    participants = [TwoPhaseParticipant(shard.database) for shard in eventsql.platform.shards]
    with monkeypatch.context() as patch:
        patch.setattr(Publications, "_publish_part", publish_part)
        with pytest.raises(KeyboardInterrupt):
            publish(origin, ROWS, access=eventsql, topic="fares")
    assert any(each.open() for each in participants)
    again = publish(origin, ROWS, access=eventsql, topic="fares")
    assert not any(each.open() for each in participants)
    assert sum(span.last - span.first + 1 for span in again.spans) == len(ROWS)


def claim_on(eventsql: EventSQLResource, name: str) -> Claim:
    """A claim on a shard, as a run hands it to an asset."""
    eventsql.platform.registry.register_topic(Topic("rides")).register_consumer(Consumer("rides", "fares"))
    shard = eventsql.shard(name)
    sql(
        shard,
        "INSERT INTO eventsql.event_buffer (eql_topic, eql_partition, eql_value, eql_metadata) "
        "VALUES ('rides', -1, 'v', '{}')",
    )
    shard.transfer.run_once()
    claim = shard.claims.claim("rides", "fares", owner="test")
    assert isinstance(claim, Claim)
    return replace(claim, shard=name)


def test_a_claim_of_one_shard_is_committed_with_events_on_all(eventsql: EventSQLResource) -> None:
    claims = [claim_on(eventsql, name) for name in NAMES]
    assert claims[0].id == claims[1].id, "the claims of both shards have equal ids"
    for number, claim in enumerate(claims, start=1):
        for repeated in (False, True):
            published = publish(Origin("run", "run", "fares"), ROWS, access=eventsql, topic="fares", claim=claim)
            assert (published.events, published.repeated) == (len(ROWS), repeated)
            assert {span.shard for span in published.spans} == set(NAMES)
        assert eventsql.shard(claim.shard).claims.get(claim.id)[1] == "committed"
        assert sum(map(len, events(eventsql.platform).values())) == number * len(ROWS)


def test_a_claim_that_was_lost_publishes_nothing(eventsql: EventSQLResource) -> None:
    claim = claim_on(eventsql, "shard-2")
    eventsql.shard("shard-2").claims.release(claim)
    with pytest.raises(ClaimLostError):
        publish(Origin("run", "run", "fares"), ROWS, access=eventsql, topic="fares", claim=claim)
    assert events(eventsql.platform) == {"shard-1": [], "shard-2": []}


def test_the_records_of_all_shards_are_deleted(instance: dg.DagsterInstance, eventsql: EventSQLResource) -> None:
    publish(Origin("gone", "gone", "fares"), ROWS, access=eventsql, topic="fares")
    later = datetime.now(UTC) + timedelta(seconds=1)
    for deleted in (1, 0):
        assert sum(delete_publications(shard, instance, before=later) for shard in eventsql.shards) == deleted
