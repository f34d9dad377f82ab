"""Checks of consumers: when they turn red and green again, with and without a run, and their alerts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import dagster as dg
import pytest
from markdown_it import MarkdownIt

from eventsql_orchestration import Event, Publication, Topic
from eventsql_orchestration.consuming.dead_letters import DeadLetters, LetterFilter
from eventsql_orchestration.consuming.lag import LagReader
from eventsql_orchestration.dagster import (
    CheckAlert,
    ConsumerCheck,
    build_alert_sensor,
    build_delivered_check,
    build_lag_check,
    build_lag_sensor,
    consumer_asset,
)
from eventsql_orchestration.dagster.monitoring.checks import GREEN_INTERVAL, IDLE_INTERVAL, RENEWAL_INTERVAL, verbatim
from eventsql_orchestration.dagster.monitoring.lag_sensor import materialized_at, observe_lag
from eventsql_orchestration.database import Connection
from eventsql_orchestration.errors import DatabaseBusyError, ValidationError
from tests.dagster.conftest import Workbench, executed_check, registering
from tests.dagster.location import AT_ONCE, record

RIDES = Topic("rides", 2)


def refuse(events: Sequence[Event], connection: Connection) -> None:
    """Fails for an event whose value is not a number."""
    for event in events:
        if event.value == b"poison":
            raise ValueError("not a number")
    record(events, connection)


eager = consumer_asset(topic=RIDES, consumer="eager", name="eager", max_attempts=1, limits=AT_ONCE)(refuse)

pytestmark = pytest.mark.prepared.with_args(registering(eager))


class Watch:
    """Ticks of the lag sensor, one after the other, whose evaluations are reported as Dagster's daemon does."""

    def __init__(self, bench: Workbench, *checks: ConsumerCheck) -> None:
        self._bench = bench
        self._checks = checks
        self._cursor: str | None = None

    def at(self, now: float, *, materialized: float | None = None) -> list[dg.AssetCheckEvaluation]:
        result = observe_lag(
            self._bench.platform, [eager], checks=self._checks, cursor=self._cursor, now=now,
            materialized={} if materialized is None else {eager.key: materialized},
        )  # fmt: skip
        self._cursor = result.cursor
        found = [event for event in result.asset_events if isinstance(event, dg.AssetCheckEvaluation)]
        for evaluation in found:
            self._bench.instance.report_runless_asset_event(evaluation)
        return found


def executed(bench: Workbench, check: ConsumerCheck) -> dg.AssetCheckEvaluation:
    return executed_check(check.definition, eager.asset, bench.eventsql, bench.instance)


# Lag


@pytest.mark.parametrize(
    ("thresholds", "passed"),
    [
        ({"max_events": 5}, True),
        ({"max_events": 4}, False),
        ({"max_seconds": 3600.0}, True),
        ({"max_seconds": 0.0}, False),
        ({"max_events": 5, "max_seconds": 0.0}, False),
    ],
)
def test_a_lag_check_turns_red_beyond_its_thresholds(
    bench: Workbench, thresholds: dict[str, Any], passed: bool
) -> None:
    bench.publish("rides", 5)
    check = build_lag_check(eager, **thresholds)
    (reported,) = Watch(bench, check).at(1_000.0)
    for evaluation in (reported, executed(bench, check)):
        assert evaluation.passed is passed
        assert evaluation.severity == dg.AssetCheckSeverity.WARN
        assert evaluation.metadata["Lag events"].value == 5


def test_a_red_lag_check_names_the_cause_and_the_limit(bench: Workbench) -> None:
    bench.publish("rides", 5)
    (evaluation,) = Watch(bench, build_lag_check(eager, max_events=4)).at(1_000.0)
    assert evaluation.description is not None
    assert evaluation.description.startswith("5 events and ")
    assert evaluation.description.endswith("beyond 4 events. `waiting: not consumed yet`")


def test_with_grace_a_lag_check_turns_red_only_after_a_time_without_a_break(bench: Workbench) -> None:
    watch = Watch(bench, build_lag_check(eager, max_events=0, grace=60.0, severity=dg.AssetCheckSeverity.ERROR))
    assert [each.passed for each in watch.at(1_000.0)] == [True]
    bench.publish("rides", 1)
    (begins,) = watch.at(1_015.0)
    assert begins.passed
    assert begins.metadata["beyond since"].value == 1_015.0
    assert "60 s" in str(begins.description)
    assert watch.at(1_074.0) == []
    (red,) = watch.at(1_075.0)
    assert (red.passed, red.severity) == (False, dg.AssetCheckSeverity.ERROR)

    bench.platform.consumers.consume_once("rides", "eager", record)
    assert [each.passed for each in watch.at(1_090.0)] == [True]
    bench.publish("rides", 1)
    assert [each.passed for each in watch.at(1_105.0)] == [True], "its grace begins anew"


def test_the_grace_of_a_lag_begins_after_the_consumer_is_registered(bench: Workbench) -> None:
    watch = Watch(bench, build_lag_check(eager, max_events=0, grace=90.0))
    bench.publish("rides", 1)
    bench.platform.registry.unregister_consumer("rides", "eager")
    (missing,) = watch.at(1_000.0)
    assert missing.metadata["missing since"].value == 1_000.0
    assert [each.passed for each in watch.at(1_060.0)] == [False]
    bench.platform.registry.register_consumer(eager.consumer)
    (begins,) = watch.at(1_075.0)
    assert begins.passed
    assert "beyond 0 events" in str(begins.description)
    assert watch.at(1_164.0) == []
    assert [each.passed for each in watch.at(1_165.0)] == [False]


def busy(*_: object, **__: object) -> None:
    raise DatabaseBusyError("canceling statement due to statement timeout")


def test_a_lag_that_takes_too_long_to_count_is_red_and_stops_no_other_check(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch(bench, build_lag_check(eager, max_events=0, grace=60.0), build_delivered_check(eager))
    bench.platform.registry.register_topic(Topic("rides_dlt"))
    poison(bench)
    bench.platform.transfer.run_once()

    monkeypatch.setattr(LagReader, "read", busy)
    assert [(each.check_name, each.passed) for each in watch.at(1_000.0)] == [("lag", True), ("delivered", False)]
    (red,) = watch.at(1_061.0)
    assert not red.passed
    assert "the lag is unknown" in str(red.description)
    monkeypatch.undo()
    assert [each.passed for each in watch.at(1_076.0)] == [True]


def test_a_check_executed_by_hand_knows_when_the_lag_began(bench: Workbench) -> None:
    check = build_lag_check(eager, max_events=0, grace=60.0)
    bench.publish("rides", 1)
    assert executed(bench, check).passed, "no check has seen the lag before"
    Watch(bench, check).at(time.time() - 61.0)
    assert not executed(bench, check).passed


def test_a_sensor_without_its_cursor_knows_when_the_lag_began(bench: Workbench) -> None:
    """A person has reset or renamed it. Otherwise the check would be green, and red again after its grace."""
    check = build_lag_check(eager, max_events=0, grace=60.0)
    bench.publish("rides", 1)
    Watch(bench, check).at(time.time() - 61.0)
    with dg.build_sensor_context(instance=bench.instance, resources={"eventsql": bench.eventsql}) as context:
        tick = build_lag_sensor([eager], checks=[check]).evaluate_tick(context)
    assert [event.passed for event in tick.asset_events if isinstance(event, dg.AssetCheckEvaluation)] == [False]


def test_a_check_is_reported_when_it_changes_and_seldom_otherwise(bench: Workbench) -> None:
    watch = Watch(bench, build_lag_check(eager, max_events=0))
    assert len(watch.at(1_000.0)) == 1
    assert watch.at(1_000.0 + GREEN_INTERVAL - 1) == []
    assert len(watch.at(1_000.0 + GREEN_INTERVAL)) == 1
    bench.publish("rides", 1)
    red = 1_000.0 + GREEN_INTERVAL + 15
    assert [each.passed for each in watch.at(red)] == [False]
    assert watch.at(red + IDLE_INTERVAL - 1) == []
    assert len(watch.at(red + IDLE_INTERVAL)) == 1
    bench.platform.registry.pause("rides", "eager")
    (other,) = watch.at(red + IDLE_INTERVAL + 15)
    assert "stopped: it is paused" in str(other.description), "another cause is reported at once"


def test_a_check_is_reported_again_after_a_materialization_because_dagster_hides_it(
    bench: Workbench,
) -> None:
    watch = Watch(bench, build_lag_check(eager, max_events=0))
    assert len(watch.at(1_000.0)) == 1
    assert watch.at(1_000.0 + RENEWAL_INTERVAL - 1, materialized=1_010.0) == []
    assert len(watch.at(1_000.0 + RENEWAL_INTERVAL, materialized=1_010.0)) == 1
    assert watch.at(1_000.0 + 2 * RENEWAL_INTERVAL, materialized=1_010.0) == [], "it was reported since"
    bench.publish("rides", 1)
    assert len(watch.at(2_000.0)) == 1
    assert [each.passed for each in watch.at(2_015.0, materialized=2_010.0)] == [False]
    assert watch.at(2_030.0, materialized=2_010.0) == []


def test_the_sensor_reads_the_time_of_the_last_materialization(bench: Workbench) -> None:
    assert materialized_at(bench.instance, [eager]) == {}
    before = time.time()
    bench.instance.report_runless_asset_event(dg.AssetMaterialization(eager.key))
    assert before <= materialized_at(bench.instance, [eager])[eager.key] <= time.time()


def test_the_checks_of_an_unregistered_consumer_are_red_after_the_time_to_register(bench: Workbench) -> None:
    stranger = consumer_asset(topic=Topic("nowhere"), consumer="c", name="stranger")(record)
    bench.platform.registry.unregister_consumer("rides", "eager")
    checks = [build_lag_check(stranger, max_events=1), build_delivered_check(stranger), build_delivered_check(eager)]
    cursor: str | None = None
    found: list[dg.AssetCheckEvaluation] = []
    for now, passed in ((0.0, True), (59.0, None), (60.0, False)):
        result = observe_lag(bench.platform, [stranger, eager], checks=checks, cursor=cursor, now=now)
        cursor = result.cursor
        found = [event for event in result.asset_events if isinstance(event, dg.AssetCheckEvaluation)]
        assert [each.passed for each in found] == ([] if passed is None else [passed] * 3)
    for each, name in zip(found, ["c", "c", "eager"], strict=True):
        assert f"consumer '{name}' of topic" in str(each.description)
        assert "`register`" in str(each.description)


def test_bad_limits_are_refused_at_definition() -> None:
    with pytest.raises(ValidationError, match="max_events, max_seconds"):
        build_lag_check(eager)
    with pytest.raises(ValidationError, match="max_events"):
        build_lag_check(eager, max_events=-1)
    with pytest.raises(ValidationError, match="grace"):
        build_lag_check(eager, max_events=1, grace=-1.0)
    with pytest.raises(ValidationError, match="does not watch"):
        build_lag_sensor([], checks=[build_delivered_check(eager)])


# Delivery


def poison(bench: Workbench, *, partition: int = 1) -> int:
    """Publish an event that the consumer gives up at once. Returns its offset."""
    before = bench.platform.reader.end("rides")
    bench.platform.publisher.publish(Publication("rides", b"poison", partition=partition))
    bench.platform.transfer.run_once()
    (event,) = bench.platform.reader.read("rides", after=before)
    bench.run(eager)
    return event.id


@pytest.mark.parametrize("settle", ["redrive", "dismiss"])
def test_delivered_is_red_from_a_dead_letter_until_it_is_redriven_or_dismissed(bench: Workbench, settle: str) -> None:
    bench.platform.registry.register_topic(Topic("rides_dlt"))
    check = build_delivered_check(eager)
    watch = Watch(bench, check)
    assert [each.passed for each in watch.at(1_000.0)] == [True]
    offset = poison(bench)
    bench.platform.transfer.run_once()
    (letter,) = bench.platform.dead_letters.list("rides")

    (red,) = watch.at(1_015.0)
    assert (red.passed, red.severity) == (False, dg.AssetCheckSeverity.ERROR)
    event = f"event `{offset}` of topic `rides[1]`"
    assert red.description == f"1 dead letter is open: {event} failed once (`ValueError: not a number`)"
    metadata: dict[str, Any] = {name: value.value for name, value in red.metadata.items()}
    assert metadata["open dead letters"] == 1
    assert metadata["show"] == f"eventsql dlt show rides {letter.id}"
    assert metadata[settle] == f"eventsql dlt {settle} rides --consumer eager --execute"
    assert metadata["dead letter topic"] == dg.AssetKey(["topic", "rides_dlt"])
    (row,) = metadata["dead letters"].records
    assert (row.data["topic"], row.data["partition"], row.data["offset"]) == ("rides", "1", str(offset))
    assert row.data["error"] == "ValueError: not a number"

    assert not executed(bench, check).passed
    assert getattr(bench.platform.dead_letters, settle)("rides", LetterFilter(ids=(letter.id,))) == 1
    assert [each.passed for each in watch.at(1_030.0)] == [True]
    assert executed(bench, check).passed


def test_delivered_is_red_while_an_event_blocks_a_partition(bench: Workbench) -> None:
    watch = Watch(bench, build_delivered_check(eager))
    offset = poison(bench)
    (red,) = watch.at(1_000.0)
    assert not red.passed
    assert red.description == (
        f"rides is blocked by event {offset}, which failed once (`ValueError: not a number`), "
        "and topic rides_dlt does not exist"
    )
    assert red.metadata["resume"].value == "eventsql consumer resume rides eager"
    bench.platform.registry.resume("rides", "eager")
    bench.platform.consumers.consume_once("rides", "eager", record)
    assert [each.passed for each in watch.at(1_015.0)] == [True]


def test_dead_letters_that_take_too_long_to_find_stop_no_other_check_and_count_as_before(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch(bench, build_lag_check(eager, max_events=0), build_delivered_check(eager))
    bench.platform.registry.register_topic(Topic("rides_dlt"))

    def verdicts(now: float) -> dict[str, bool]:
        return {each.check_name: each.passed for each in watch.at(now)}

    assert verdicts(1_000.0) == {"lag": True, "delivered": True}
    bench.publish("rides", 1)
    with monkeypatch.context() as patched:
        patched.setattr(DeadLetters, "list", busy)
        assert verdicts(1_015.0) == {"lag": False, "delivered": True}
    poison(bench)
    bench.platform.transfer.run_once()
    assert verdicts(1_030.0) == {"lag": True, "delivered": False}
    monkeypatch.setattr(DeadLetters, "list", busy)
    (red,) = watch.at(1_045.0)
    assert not red.passed
    assert "had undelivered events" in str(red.description)


def test_letters_of_other_consumers_and_of_a_deleted_topic_do_not_count(bench: Workbench) -> None:
    registry, check = bench.platform.registry, build_delivered_check(eager)
    registry.register_topic(Topic("rides_dlt"))
    watch = Watch(bench, check)
    theirs = {"dlt_consumer": "somebody", "dlt_topic": "rides", "dlt_partition": "0", "dlt_offset": "1"}
    for _ in range(3):
        bench.platform.publisher.publish(Publication("rides_dlt", b"", metadata=theirs))
    bench.platform.transfer.run_once()
    assert [each.passed for each in watch.at(1_000.0)] == [True]

    registry.unregister_topic("rides_dlt", force=True)
    registry.register_topic(Topic("rides_dlt"))
    poison(bench)
    bench.platform.transfer.run_once()
    assert [each.passed for each in watch.at(1_015.0)] == [False], (
        "its ids begin again, below the ids that the check has searched"
    )


def test_a_letter_counts_although_its_offset_was_searched_before_a_failover(bench: Workbench) -> None:
    bench.platform.registry.register_topic(Topic("rides_dlt"))
    watch = Watch(bench, build_delivered_check(eager))
    bench.publish("rides_dlt", 3)
    assert [each.passed for each in watch.at(1_000.0)] == [True]

    # As on a promoted standby that lacked these letters.
    with bench.platform.database.connection() as connection:
        connection.execute("DELETE FROM eventsql.rides_dlt_event")
        connection.execute("ALTER SEQUENCE eventsql.rides_dlt_event_eql_id_seq RESTART")
    watch.at(1_015.0)
    poison(bench)
    bench.platform.transfer.run_once()
    (letter,) = bench.platform.dead_letters.list("rides")
    assert letter.id <= 3
    assert [each.passed for each in watch.at(1_030.0)] == [False]


def test_many_letters_are_counted_up_to_a_limit_and_the_oldest_are_named(bench: Workbench) -> None:
    bench.platform.registry.register_topic(Topic("rides_dlt"))
    mine = {"dlt_consumer": "eager", "dlt_topic": "rides", "dlt_partition": "-1", "dlt_exception": "E"}
    bench.platform.publisher.publish_all(
        Publication("rides_dlt", b"", metadata={**mine, "dlt_offset": str(offset)}) for offset in range(30)
    )
    bench.platform.transfer.run_once()
    (red,) = Watch(bench, build_delivered_check(eager)).at(0.0)
    assert str(red.description).startswith(
        "more than 10 dead letters are open, the oldest: event `0` of topic `rides` failed some times (`E: "
    )
    table: Any = red.metadata["dead letters"].value
    assert {row.data["partition"] for row in table.records} == {"all"}
    assert len(table.records) == 10


@pytest.mark.parametrize(
    "text",
    [
        "expected <class 'int'>, got <img src='https://example.org/seen'>",
        "[approve](https://example.org) ![](https://example.org/seen) **now** &lt; \\<b>",
        "`one` and ```three``` [link](https://example.org)",
        "`",
        "first\n\n# title\n\n- [link](https://example.org)",
    ],
)
def test_the_text_of_an_error_is_shown_as_it_is(bench: Workbench, text: str) -> None:
    bench.platform.registry.register_topic(Topic("rides_dlt"))
    theirs = dict.fromkeys(["dlt_topic", "dlt_partition", "dlt_offset", "dlt_attempts"], text)
    letter = {**theirs, "dlt_consumer": "eager", "dlt_exception": "E", "dlt_message": text}
    bench.platform.publisher.publish(Publication("rides_dlt", b"", metadata=letter))
    bench.platform.transfer.run_once()
    (red,) = Watch(bench, build_delivered_check(eager)).at(0.0)

    blocks = MarkdownIt().parse(str(red.description))
    assert [block.type for block in blocks] == ["paragraph_open", "inline", "paragraph_close"]
    parts = blocks[1].children or []
    assert {part.type for part in parts} == {"text", "code_inline"}
    assert parts[-2].content == f"E: {' '.join(text.split())}"


def test_a_text_without_a_character_has_no_marks_of_code() -> None:
    assert [verbatim(text) for text in ("", " \n", "`")] == ["", "", "`` ` ``"]


# Alerts


class Pager:
    """Takes alerts, and fails while it is `down`."""

    def __init__(self) -> None:
        self.alerts: list[CheckAlert] = []
        self.down: Callable[[CheckAlert], bool] = lambda _: False

    def __call__(self, alert: CheckAlert) -> None:
        if self.down(alert):
            raise ConnectionError("the pager does not answer")
        self.alerts.append(alert)


def test_an_alert_is_sent_when_a_check_turns_red_and_when_it_is_green_again(bench: Workbench) -> None:
    check, pager = build_lag_check(eager, max_events=0), Pager()
    watch, sensor = Watch(bench, check), build_alert_sensor([check], pager)
    cursor: str | None = None

    def tick() -> list[CheckAlert]:
        nonlocal cursor
        pager.alerts.clear()
        with dg.build_sensor_context(instance=bench.instance, cursor=cursor) as context:
            cursor = sensor.evaluate_tick(context).cursor
        return list(pager.alerts)

    assert tick() == [], "it was never evaluated"
    watch.at(1_000.0)
    assert tick() == [], "a check that is green from the beginning alerts nobody"
    bench.publish("rides", 2)
    watch.at(1_015.0)
    (red,) = tick()
    assert str(red).startswith("check lag of eager is red (WARN): 2 events and ")
    assert red.metadata["Lag events"] == 2
    assert red.asset == eager.key
    watch.at(1_015.0 + IDLE_INTERVAL)
    assert tick() == [], "each alert is sent once"
    bench.platform.consumers.consume_once("rides", "eager", record)
    watch.at(2_000.0)
    (green,) = tick()
    assert green.passed
    assert "is green again" in str(green)


def test_an_unsent_alert_is_sent_again_and_does_not_delay_others(bench: Workbench) -> None:
    checks = [build_lag_check(eager, max_events=0), build_delivered_check(eager)]
    pager = Pager()
    sensor = build_alert_sensor(checks, pager)
    poison(bench)
    Watch(bench, *checks).at(1_000.0)

    def tick(cursor: str | None) -> str | None:
        with dg.build_sensor_context(instance=bench.instance, cursor=cursor) as context:
            return sensor.evaluate_tick(context).cursor

    pager.down = lambda alert: alert.check == "lag"
    cursor = tick(None)
    assert [alert.check for alert in pager.alerts] == ["delivered"]
    with pytest.raises(ConnectionError):
        tick(cursor)
    pager.down = lambda _: False
    tick(cursor)
    assert [alert.check for alert in pager.alerts] == ["delivered", "lag"]


def test_an_alert_that_was_not_awaited_is_not_sent(bench: Workbench) -> None:
    async def page(alert: CheckAlert) -> None:
        raise AssertionError

    def send(alert: CheckAlert) -> object:
        return page(alert)

    check = build_lag_check(eager, max_events=0)
    with pytest.raises(ValidationError, match="would never run"):
        build_alert_sensor([check], page)
    sensor = build_alert_sensor([check], send)
    bench.publish("rides", 1)
    Watch(bench, check).at(1_000.0)
    with dg.build_sensor_context(instance=bench.instance) as context, pytest.raises(TypeError):
        sensor.evaluate_tick(context)


def test_an_alert_sensor_without_checks_is_refused() -> None:
    with pytest.raises(ValidationError):
        build_alert_sensor([], print)
