"""What Spark's writes leave stops growing, and a batch whose record is gone is refused, never published twice."""

from __future__ import annotations

import uuid

import pyarrow as pa  # type: ignore[import-untyped]  # it has no types
import pytest

from eventsql_orchestration import Consumer, EventSQL, Topic
from eventsql_orchestration.consuming import claim_pruning
from eventsql_orchestration.consuming.claims import Claim
from eventsql_orchestration.errors import ConfigurationError
from eventsql_orchestration.model import Retention
from eventsql_orchestration.publishing import log_room
from eventsql_orchestration.spark import commit_log
from eventsql_orchestration.spark.commit_log import unnamed
from eventsql_orchestration.spark.commit_protocol import Publications
from eventsql_orchestration.spark.options import Source
from eventsql_orchestration.spark.staging import ClaimHold, StreamBatch, stage
from eventsql_orchestration.storage import segments
from tests.growth import Round, grown, let_a_month_pass
from tests.shards.conftest import Databases, Open, databases, opened

__all__ = ["databases", "opened"]

EVENTS = 30


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "SEGMENT_EVENTS", 5 * EVENTS)
    monkeypatch.setattr(log_room, "ROOM_CHECK", 1)
    monkeypatch.setattr(claim_pruning, "EVERY", 1)
    monkeypatch.setattr(commit_log, "KEPT_BATCHES", 3)


def events() -> pa.RecordBatch:
    keys = [str(number) for number in range(EVENTS)]
    return pa.record_batch({"key": pa.array(keys), "value": pa.array([b""] * EVENTS, pa.binary())})


def write(platform: EventSQL, name: str, batch: int, *, claim: Claim | None = None, replayed: bool = False) -> bool:
    source = Source.of([shard.database.dsn for shard in platform.shards], "eventsql")
    with Publications(source) as publications:
        attempt = stage(publications.write_targets("orders", {}), [events()])
        hold = None if claim is None else ClaimHold(claim.id, claim.epoch)
        try:
            return publications.publish(name, batch, [attempt], hold, stream=StreamBatch() if replayed else None)
        except BaseException:
            publications.discard([attempt])
            raise


def prepare(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders", 2, retention=Retention(seconds=86_400)))
    platform.registry.register_consumer(Consumer("orders", "sums"))


def consume(platform: EventSQL) -> None:
    platform.transfer.run_once()
    while platform.consumers.consume_once("orders", "sums", lambda *_: None):
        pass


def stream(platform: EventSQL, number: int) -> None:
    for batch in range(5 * number, 5 * number + 5):
        assert write(platform, "copies", batch, replayed=True)
    consume(platform)


def without_a_name(platform: EventSQL, number: int) -> None:
    for _ in range(3):
        assert write(platform, unnamed(), 0)
    consume(platform)


def killed(platform: EventSQL, number: int) -> None:
    """A driver that stages and is killed before it publishes, each time."""
    for shard in platform.shards:
        with Publications(Source.of([shard.database.dsn], "eventsql")) as publications:
            stage(publications.write_targets("orders", {}), [events()])


def with_a_claim(platform: EventSQL, number: int) -> None:
    assert write(platform, unnamed(), 0)
    platform.transfer.run_once()
    claim = platform.claims.claim("orders", "sums", owner="script", max_wait=0)
    assert isinstance(claim, Claim)
    assert write(platform, f"claim-{claim.id}", 0, claim=claim)
    consume(platform)


@pytest.mark.parametrize("live", [stream, without_a_name, killed, with_a_claim], ids=lambda live: live.__name__)
def test_writes_stop_growing(platform: EventSQL, live: Round) -> None:
    prepare(platform)
    assert grown(platform, live) == {}


@pytest.mark.nightly
@pytest.mark.parametrize("live", [stream, without_a_name], ids=lambda live: live.__name__)
def test_writes_over_shards_stop_growing(databases: Databases, opened: Open, live: Round) -> None:
    platform = opened(*databases(2))
    prepare(platform)
    assert grown(platform, live) == {}


def test_a_write_without_a_name_leaves_no_record(platform: EventSQL) -> None:
    prepare(platform)
    assert write(platform, unnamed(), 0)
    with platform.database.connection() as connection:
        assert connection.execute("SELECT count(*) FROM eventsql.spark_publication").fetchone() == (0,)
    assert platform.buffered() == {"orders": EVENTS}


def test_a_batch_whose_record_is_gone_is_refused_and_not_published_twice(platform: EventSQL) -> None:
    prepare(platform)
    for batch in range(1, 6):
        write(platform, "copies", batch, replayed=True)
    let_a_month_pass(platform)
    write(platform, "copies", 6, replayed=True)
    with platform.database.connection() as connection:
        kept = connection.execute("SELECT eql_batch FROM eventsql.spark_publication ORDER BY 1").fetchall()
    assert kept == [(3,), (4,), (5,), (6,)], "the newest three, and the one that says that others went"
    published = platform.buffered()
    for batch in (1, 2):
        with pytest.raises(ConfigurationError):
            write(platform, "copies", batch, replayed=True)
    for batch in (3, 4, 5, 6):
        assert not write(platform, "copies", batch)
    assert platform.buffered() == published
    assert write(platform, "copies", 7)
    assert write(platform, f"other {uuid.uuid4()}", 1)


def test_a_batch_beyond_those_that_went_is_published_though_a_later_one_was(platform: EventSQL) -> None:
    prepare(platform)
    for batch in (1, 2, 3, 100, 101):
        write(platform, "copies", batch)
    let_a_month_pass(platform)
    write(platform, "copies", 102)
    assert write(platform, "copies", 50)
    with pytest.raises(ConfigurationError):
        write(platform, "copies", 2)
