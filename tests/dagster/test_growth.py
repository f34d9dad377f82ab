"""The tables of a database whose consumers are backfilled stop growing."""

from __future__ import annotations

from eventsql_orchestration import Consumer, EventSQL, Publication, Topic
from eventsql_orchestration.consuming.claims import Claim
from eventsql_orchestration.model import Retention
from eventsql_orchestration.orchestration.backfills.registry import Backfills
from eventsql_orchestration.orchestration.backfills.windows import ReplayRange
from eventsql_orchestration.topics.positions import Earliest
from tests.growth import grown


def test_ended_backfills_leave_nothing(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders", 2, retention=Retention(events=50)))
    platform.registry.register_consumer(Consumer("orders", "ledger", partitioned=True))
    backfills = Backfills(platform.shards)

    def live(_platform: EventSQL, number: int) -> None:
        platform.publisher.publish_all(Publication("orders", b"", key=str(key)) for key in range(60))
        platform.transfer.run_once()
        while platform.consumers.consume_once("orders", "ledger", lambda *_: None):
            pass
        plan = backfills.plan("orders", "ledger", ReplayRange(Earliest(), window_events=20))
        backfills.register(plan, f"n{number}")
        for part in backfills.get("orders", f"n{number}").parts:
            while isinstance(
                claim := platform.claims.claim(
                    "orders", part.name, part.partition, owner=f"run {number}", max_wait=0, max_events=10
                ),
                Claim,
            ):
                platform.claims.process(claim, lambda *_: None)
        assert backfills.finish(backfills.get("orders", f"n{number}"))

    kept = {table: sizes for table, sizes in grown(platform, live).items() if "orders_event" not in table}
    # The log is bounded by segments of five million ids.
    assert kept == {}
