"""`eventsql seek`: a plan, and with --execute the move."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from datetime import timedelta

import pytest
from click.testing import Result

from eventsql_orchestration import Consumer, Event, EventSQL, Publication, Topic
from eventsql_orchestration.database import Connection
from eventsql_orchestration.maintenance import seek as seek_module
from eventsql_orchestration.topics.positions import Earliest
from tests.cli.conftest import Run
from tests.forms import ids_in


def prepare(platform: EventSQL) -> None:
    """Events 1 to 1200 in two partitions in turn, consumed to the end by a consumer of each form."""
    platform.registry.register_topic(Topic("orders", 2))
    platform.publisher.publish_all(Publication("orders", b"x", partition=n % 2) for n in range(1_200))
    platform.transfer.run_once()
    platform.registry.register_consumer(Consumer("orders", "fares", partitioned=True), start="latest")
    platform.registry.register_consumer(Consumer("orders", "whole"), start="latest")


pytestmark = pytest.mark.prepared.with_args(prepare)


def offsets(platform: EventSQL, consumer: str) -> list[int]:
    return [state.last_event_id for state in platform.registry.consumer("orders", consumer)]


def test_without_execute_a_seek_is_a_plan(run: Run, platform: EventSQL) -> None:
    result = run("seek", "orders", "fares", "--to-earliest")
    assert result.exit_code == 0
    assert result.stderr == "eventsql: a plan, nothing has moved: run it again with --execute\n"
    assert [line.split() for line in result.stdout.splitlines()] == [
        ["partition", "from", "to", "consumed", "again", "skipped", "remark"],
        ["0", "1,200", "0", "600", "0", "-"],
        ["1", "1,200", "0", "600", "0", "-"],
    ]
    assert offsets(platform, "fares") == [1_200, 1_200]


def test_with_execute_it_moves(run: Run, platform: EventSQL) -> None:
    again = [sum(offset > 1_000 for offset in ids_in(platform, "orders", partition)) for partition in (0, 1)]
    result = run("seek", "orders", "fares", "--to-offset", 1_001, "--execute", "--json")
    assert (result.exit_code, result.stderr) == (0, "eventsql: consumer 'fares' of topic 'orders' moved\n")
    assert json.loads(result.stdout) == {
        "topic": "orders",
        "consumer": "fares",
        "executed": True,
        "moves": [
            {"partition": partition, "from": 1_200, "to": 1_000, "consumed_again": again[partition],
             "skipped": 0, "clamped": False, "leased_by": None}
            for partition in (0, 1)
        ],
    }  # fmt: skip
    assert sum(again) == 200
    assert offsets(platform, "fares") == [1_000, 1_000]


@pytest.mark.parametrize(
    ("options", "reached"),
    [
        (["--to-earliest"], 0),
        (["--to-latest"], 1_200),
        (["--to-offset", "7"], 6),
        (["--to-datetime", "2020-01-01T00:00:00Z"], 0),
        (["--to-datetime", "9000-01-01T00:00:00+01:00"], 1_200),
        (["--by-duration", "1d"], 0),
        (["--by-duration", "PT1H"], 0),
        (["--shift-by", "5"], 605),
        (["--shift-by", "-5"], 595),
    ],
)
def test_every_place_can_be_named(run: Run, platform: EventSQL, options: list[str], reached: int) -> None:
    assert run("seek", "orders", "whole", "--to-offset", 601, "--execute").exit_code == 0
    result = run("seek", "orders", "whole", *options, "--execute")
    assert result.exit_code == 0, result.stderr
    assert offsets(platform, "whole") == [reached]


def test_a_time_between_two_events_is_the_second(run: Run, platform: EventSQL) -> None:
    platform.publisher.publish(Publication("orders", b"x", partition=0))
    platform.transfer.run_once()
    (last,) = platform.reader.read("orders", after=1_200)
    before = last.created_at - timedelta(microseconds=1)
    assert run("seek", "orders", "whole", "--to-datetime", before.isoformat(), "--execute").exit_code == 0
    assert offsets(platform, "whole") == [1_200]


def test_one_partition_moves_alone(run: Run, platform: EventSQL) -> None:
    assert run("seek", "orders", "fares", "--to-earliest", "--partition", 1, "--execute").exit_code == 0
    assert offsets(platform, "fares") == [1_200, 0]


def test_the_plan_says_where_the_log_ends_and_who_leases(run: Run, platform: EventSQL) -> None:
    platform.registry.register_consumer(Consumer("orders", "early"))
    platform.claims.claim("orders", "early", owner="run 7")
    shown = run("seek", "orders", "early", "--to-offset", 5_000).stdout
    assert "the log ends there; leased by run 7" in shown
    (move,) = json.loads(run("seek", "orders", "early", "--to-offset", 5_000, "--json").stdout)["moves"]
    assert (move["to"], move["clamped"], move["leased_by"]) == (1_200, True, "run 7")


def test_a_leased_consumer_moves_by_force_only(run: Run, platform: EventSQL) -> None:
    platform.registry.register_consumer(Consumer("orders", "early"))
    platform.claims.claim("orders", "early", owner="run 7")
    refused = run("seek", "orders", "early", "--to-latest", "--execute")
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "run 7 leases it" in refused.stderr
    assert offsets(platform, "early") == [0]
    assert run("seek", "orders", "early", "--to-latest", "--execute", "--force").exit_code == 0
    assert offsets(platform, "early") == [1_200]


def test_a_consumer_that_is_being_consumed_for_long_fails_the_command(
    run: Run, platform: EventSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seek_module, "LOCK_SECONDS", 0.05)
    results: list[Result] = []

    def seek() -> None:
        results.append(run("seek", "orders", "whole", "--to-earliest", "--execute"))

    def handle(events: Sequence[Event], connection: Connection) -> None:
        other = threading.Thread(target=seek)
        other.start()
        other.join()

    platform.seeker.execute("orders", "whole", Earliest())
    platform.consumers.consume_once("orders", "whole", handle)
    assert [result.exit_code for result in results] == [1]
    assert "did not move" in results[0].stderr
