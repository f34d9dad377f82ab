"""`eventsql topic` and `eventsql consumer`."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from eventsql_orchestration import Consumer, ConsumerState, EventSQL, Publication, Topic
from eventsql_orchestration.cli.consumer import condition
from eventsql_orchestration.cli.tables import cell
from eventsql_orchestration.consumer import EventFilter
from eventsql_orchestration.database.installation import REGISTRY_LOCK
from eventsql_orchestration.model import Retention
from eventsql_orchestration.publishing import log_room
from eventsql_orchestration.storage import segments
from tests.cli.conftest import Run
from tests.fixtures import Sessions


def prepare(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("account_created", partitions=2))


pytestmark = pytest.mark.prepared.with_args(prepare, fixture="topic")


@pytest.fixture
def topic() -> str:
    return "account_created"


def test_a_topic_is_created_once(run: Run, platform: EventSQL) -> None:
    first = run("topic", "create", "account_created", "--partitions", 3)
    assert (first.exit_code, first.stdout) == (0, "")
    assert first.stderr == "eventsql: topic 'account_created' created, 3 partitions\n"
    again = run("topic", "create", "account_created", "--partitions", 3)
    assert again.exit_code == 0
    assert "exists already" in again.stderr
    assert platform.registry.topics() == [Topic("account_created", 3)]


def test_a_topic_is_not_partitioned_unless_it_is_asked_for(run: Run, platform: EventSQL) -> None:
    result = run("topic", "create", "plain")
    assert "not partitioned" in result.stderr
    assert platform.registry.topic("plain").partitions == -1


def test_a_topic_can_be_created_with_its_dead_letters(run: Run, platform: EventSQL) -> None:
    assert run("topic", "create", "account_created", "--partitions", 2, "--dead-letters").exit_code == 0
    assert platform.registry.topics() == [Topic("account_created", 2), Topic("account_created_dlt")]


def test_partitions_change_while_a_topic_is_empty(run: Run, platform: EventSQL, topic: str) -> None:
    result = run("topic", "create", topic, "--partitions", 5)
    assert "is changed: 5 partitions; it was: 2 partitions" in result.stderr
    platform.publisher.publish(Publication(topic, b"1"))
    result = run("topic", "create", topic, "--partitions", 6)
    assert result.exit_code == 1
    assert "it has events" in result.stderr
    assert platform.registry.topic(topic).partitions == 5


def test_topics_are_listed_as_a_table_and_as_json(run: Run, platform: EventSQL, topic: str) -> None:
    platform.registry.register_topic(Topic("plain"))
    table = run("topic", "list")
    assert table.stderr == ""
    assert [line.split()[:2] for line in table.stdout.splitlines()] == [
        ["topic", "partitions"],
        [topic, "2"],
        ["plain", "-"],
    ]
    listed = json.loads(run("topic", "list", "--json").stdout)
    assert [(entry["topic"], entry["partitions"]) for entry in listed] == [(topic, 2), ("plain", -1)]


def test_an_empty_registry_lists_nothing(run: Run) -> None:
    for command in ("topic", "consumer"):
        assert json.loads(run(command, "list", "--json").stdout) == []
        assert run(command, "list").exit_code == 0


def test_a_topic_is_described_with_its_partitions_and_consumers(run: Run, platform: EventSQL, topic: str) -> None:
    platform.registry.register_consumer(Consumer(topic, "mailer", partitioned=True))
    platform.publisher.publish_all(Publication(topic, b"x", partition=1) for _ in range(1_200))
    platform.transfer.run_once()
    described = json.loads(run("topic", "describe", topic, "--json").stdout)
    assert described["events"] == 1_200
    assert described["dead_letter_topic"] is None
    assert described["log"] == [
        {"partition": 0, "events": 0, "end": 0},
        {"partition": 1, "events": 1_200, "end": 1_200},
    ]
    assert [entry["lag_events"] for entry in described["consumers"]] == [0, 1_200]
    text = run("topic", "describe", topic).stdout
    assert "mailer" in text
    assert "1,200" in text


def test_a_topic_with_events_is_deleted_by_force_only(run: Run, platform: EventSQL, topic: str) -> None:
    platform.publisher.publish(Publication(topic, b"1"))
    platform.registry.register_consumer(Consumer(topic, "mailer"))
    platform.transfer.run_once()
    planned = run("topic", "delete", topic)
    assert planned.stderr == (
        f"eventsql: a plan, nothing is done: topic {topic!r} would be deleted with about 1 event, consumer 'mailer'; "
        "run it again with --execute --force\n"
    )
    platform.registry.unregister_consumer(topic, "mailer")
    refused = run("topic", "delete", topic, "--execute")
    assert refused.exit_code == 1
    assert "it has events" in refused.stderr
    assert run("topic", "delete", topic, "--execute", "--force").exit_code == 0
    assert platform.registry.topics() == []


def test_a_topic_is_created_with_its_retention(run: Run, platform: EventSQL) -> None:
    result = run(
        "topic", "create", "account_created", "--partitions", 3, "--retention-age", "7d", "--retention-size", "10GiB",
        "--retention-events", 1_000_000,
    )  # fmt: skip
    assert result.exit_code == 0
    assert result.stderr == (
        "eventsql: topic 'account_created' created, 3 partitions, kept: 7 d, 10 GiB, 1,000,000 events\n"
    )
    week = Retention(604_800, 10 * 2**30, 1_000_000)
    assert platform.registry.topic("account_created").retention == week
    again = run("topic", "create", "account_created", "--partitions", 3, "--retention-age", "36h")
    assert "is changed: 3 partitions, kept: 1 d 12 h, 10 GiB" in again.stderr
    assert platform.registry.topic("account_created").retention == replace(week, seconds=129_600)


@pytest.fixture
def old(run: Run, platform: EventSQL, monkeypatch: pytest.MonkeyPatch) -> str:
    """A topic with two segments that are beyond its retention, one of which a consumer has not passed."""
    monkeypatch.setattr(segments, "SEGMENT_EVENTS", 10)
    monkeypatch.setattr(log_room, "ROOM_CHECK", 1)
    platform.registry.register_topic(Topic("old"))
    platform.registry.register_consumer(Consumer("old", "mailer"))
    for _ in range(10):
        # Blocks of three end where the first segment ends.
        platform.publisher.publish_all(Publication("old", b"") for _ in range(3))
        platform.transfer.run_once()
    platform.consumers.consume_once("old", "mailer", lambda *_: None, max_events=12)
    assert run("topic", "alter", "old", "--retention-events", 5).exit_code == 0
    return "old"


def test_retention_is_planned_and_kept_to(run: Run, platform: EventSQL, old: str) -> None:
    planned = json.loads(run("topic", "retain", old, "--json").stdout)
    assert platform.reader.count(old) == 30
    shown = run("topic", "retain", "--execute")
    assert "1 segment" in shown.stdout
    assert "consumer 'mailer'" in shown.stdout
    assert platform.reader.count(old) == 21
    assert [(each["topic"], each["segments"], each["upto"]) for each in planned] == [("old", 1, 9)]
    assert run("topic", "retain", old, "--execute", "--force").exit_code == 0
    assert platform.reader.count(old) <= 12
    assert "all of its events are beyond the retention" not in shown.stderr
    assert "a segment is dropped as a whole" in run("topic", "retain", old, "--execute", "--force").stderr


def test_doctor_names_the_consumer_that_keeps_events_beyond_their_retention(
    run: Run, platform: EventSQL, old: str, sessions: Sessions
) -> None:
    def found() -> list[str]:
        findings = json.loads(run("doctor", "--json").stdout)["findings"]
        return [each["message"] for each in findings if each["check"] == "retention"]

    # A change of a definition that does not end keeps nobody from looking.
    sessions().execute("SELECT pg_advisory_xact_lock(%s)", [REGISTRY_LOCK])
    assert found() == [f"topic {old} keeps events beyond its retention, because consumer 'mailer' has not passed them"]
    while platform.consumers.consume_once(old, "mailer", lambda *_: None):
        pass
    assert found() == []


def test_nothing_is_dropped_where_no_topic_has_a_retention(run: Run, topic: str) -> None:
    result = run("topic", "retain", topic, "--execute")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "eventsql topic alter" in result.stderr


def test_a_topic_is_repartitioned_while_its_consumers_go_on(run: Run, platform: EventSQL, topic: str) -> None:
    platform.registry.register_consumer(Consumer(topic, "mailer", partitioned=True))
    platform.publisher.publish_all(Publication(topic, b"x") for _ in range(6))
    result = run("topic", "alter", topic, "--partitions", 5, "--retention-events", 9)
    assert result.exit_code == 0
    assert f"topic {topic!r} has 5 partitions after offset 6; it had 2" in result.stderr
    assert "consumers that finish the old partitions first: mailer; sensors" in result.stderr
    assert platform.registry.topic(topic) == Topic(topic, 5)
    assert platform.registry.topic(topic).retention == Retention(events=9)
    described = run("topic", "describe", topic)
    assert "consumer 'mailer' finishes its partitions up to offset 6 before it begins with the new" in described.stderr
    assert run("topic", "alter", topic, "--partitions", 1).exit_code == 0
    layouts = json.loads(run("topic", "describe", topic, "--json").stdout)
    assert layouts["events"] == 6
    assert len(layouts["log"]) == 5
    assert [(each["partitions"], each["after"]) for each in layouts["layouts"]] == [(2, 0), (5, 6), (1, 6)]
    assert layouts["unsettled_consumers"] == [{"consumer": "mailer", "until": 6, "waits_for": []}]
    assert "has 1 partition already" in run("topic", "alter", topic, "--partitions", 1).stderr


def test_a_topic_does_not_lose_its_partitions_with_its_events(run: Run, platform: EventSQL, topic: str) -> None:
    platform.publisher.publish(Publication(topic, b"x"))
    refused = run("topic", "alter", topic, "--partitions", -1)
    assert refused.exit_code == 1
    assert "cannot get no partitions, because it has events" in refused.stderr
    assert "register it with 2 partitions, or register another topic" in run("topic", "create", topic).stderr
    assert platform.registry.topic(topic) == Topic(topic, 2)
    platform.registry.register_topic(Topic("whole")).register_consumer(Consumer("whole", "mailer"))
    assert "because it has 1 consumer, whose offsets" in run("topic", "alter", "whole", "--partitions", 2).stderr


def test_the_retention_of_a_topic_is_altered_bound_by_bound(run: Run, platform: EventSQL, topic: str) -> None:
    platform.publisher.publish(Publication(topic, b"1"))
    assert run("topic", "alter", topic, "--retention-age", "PT90S").exit_code == 0
    result = run("topic", "alter", topic, "--retention-size", 4_096)
    assert "is changed: 2 partitions, kept: 1 min 30 s, 4 KiB; it was: 2 partitions, kept: 1 min 30 s" in result.stderr
    assert platform.registry.topic(topic).retention == Retention(seconds=90, bytes=4_096)
    assert "exists already" in run("topic", "alter", topic, "--retention-size", 4_096).stderr
    result = run("topic", "alter", topic, "--keep-forever")
    assert "is changed: 2 partitions, kept: for ever; it was: 2 partitions, kept:" in result.stderr
    assert platform.registry.topic(topic).retention is None
    assert platform.registry.topic(topic).partitions == 2


def test_the_retention_of_a_topic_is_shown(run: Run, platform: EventSQL, topic: str) -> None:
    platform.registry.register_topic(Topic("plain"))
    platform.registry.set_retention(topic, Retention(seconds=0.5, bytes=3, events=1))
    lines = run("topic", "list").stdout.splitlines()
    assert [line.rpartition("  ")[2] for line in lines] == ["kept", "0.5 s, 3 bytes, 1 event", "for ever"]
    assert "0.5 s, 3 bytes, 1 event" in run("topic", "describe", topic).stdout
    listed = json.loads(run("topic", "list", "--json").stdout)
    assert [entry["retention"] for entry in listed] == [{"seconds": 0.5, "bytes": 3, "events": 1}, None]
    assert json.loads(run("topic", "describe", topic, "--json").stdout)["retention"]["bytes"] == 3


# Consumers


def test_a_consumer_is_created_once_and_keeps_its_attempts(run: Run, platform: EventSQL, topic: str) -> None:
    first = run("consumer", "create", topic, "mailer", "--partitioned", "--max-attempts", 9)
    assert (first.exit_code, first.stdout) == (0, "")
    again = run("consumer", "create", topic, "mailer", "--partitioned")
    assert again.exit_code == 0
    assert "exists already" in again.stderr
    assert [(s.partition, s.max_attempts) for s in platform.registry.consumer(topic, "mailer")] == [(0, 9), (1, 9)]
    assert run("consumer", "create", topic, "a mailer").exit_code == 0
    assert f"`eventsql seek {topic} 'a mailer'`" in run("consumer", "create", topic, "a mailer", "--from", 1).stderr


def test_a_consumer_in_the_other_form_is_refused_and_keeps_its_unread_events(
    run: Run, platform: EventSQL, topic: str
) -> None:
    platform.publisher.publish(Publication(topic, b"1"))
    platform.transfer.run_once()
    assert run("consumer", "create", topic, "cli2", "--partitioned").exit_code == 0
    before = platform.registry.consumer(topic, "cli2")
    refused = run("consumer", "create", topic, "cli2", "--start", "latest")
    assert (refused.exit_code, refused.stdout, len(refused.stderr.splitlines())) == (1, "", 1)
    assert f"`eventsql consumer delete --execute {topic} cli2`" in refused.stderr
    assert platform.registry.consumer(topic, "cli2") == before


def test_a_consumer_that_exists_keeps_its_offsets_and_its_changes_are_told(
    run: Run, platform: EventSQL, topic: str
) -> None:
    platform.publisher.publish(Publication(topic, b"1"))
    platform.transfer.run_once()
    run("consumer", "create", topic, "mailer")
    changed = run("consumer", "create", topic, "mailer", "--start", "latest", "--max-attempts", 9)
    assert changed.exit_code == 0
    assert "max attempts: 9 (was 5)" in changed.stderr
    assert f"`eventsql seek {topic} mailer`" in changed.stderr
    assert platform.registry.consumer(topic, "mailer")[0].last_event_id == 0


@pytest.mark.parametrize("option", ["--start", "--from"])
def test_a_consumer_can_begin_anywhere(run: Run, platform: EventSQL, topic: str, option: str) -> None:
    for _ in range(3):
        platform.publisher.publish(Publication(topic, b"1"))
        platform.transfer.run_once()
    second = platform.reader.read(topic)[1].created_at
    for start, offset in (("earliest", 0), ("latest", 3), (2, 1), (50, 3), (second.isoformat(), 1), ("1h", 0)):
        name = f"from {start}"
        assert run("consumer", "create", topic, name, option, start).exit_code == 0
        assert platform.registry.consumer(topic, name)[0].last_event_id == offset


def test_a_consumer_has_a_filter(run: Run, platform: EventSQL, topic: str) -> None:
    result = run(
        "consumer", "create", topic, "mailer", "--key", "b1", "--key", "b2", "--key-prefix", "b",
        "--metadata", "source=web", "--metadata", "kind=",
    )  # fmt: skip
    assert result.exit_code == 0
    shown = "key b1 or b2, key b*, kind=, source=web"
    assert result.stderr == f"eventsql: consumer 'mailer' of topic {topic!r} created; only events with {shown}\n"
    (state,) = platform.registry.consumer(topic, "mailer")
    assert state.filter == EventFilter(frozenset(["b1", "b2"]), "b", {"source": "web", "kind": ""})
    assert shown in run("consumer", "list").stdout
    assert shown in run("consumer", "describe", topic, "mailer").stdout
    for command in (["list"], ["describe", topic, "mailer"]):
        (entry,) = json.loads(run("consumer", *command, "--json").stdout)
        assert entry["filter"] == {"keys": ["b1", "b2"], "key_prefix": "b", "metadata": {"kind": "", "source": "web"}}


def test_a_filter_stays_until_another_is_given_or_none_is_asked_for(run: Run, platform: EventSQL, topic: str) -> None:
    def conditions(*options: str) -> EventFilter | None:
        assert run("consumer", "create", topic, "mailer", *options).exit_code == 0
        return platform.registry.consumer(topic, "mailer")[0].filter

    assert conditions() is None
    assert conditions("--key", "a") == EventFilter(frozenset("a"))
    assert conditions("--max-attempts", "7") == EventFilter(frozenset("a"))
    assert conditions("--key-prefix", "b") == EventFilter(key_prefix="b")
    assert platform.registry.consumer(topic, "mailer")[0].max_attempts == 7
    assert conditions("--no-filter") is None
    assert json.loads(run("consumer", "list", "--json").stdout)[0]["filter"] is None


def test_consumers_are_listed_of_one_topic_or_of_all(run: Run, platform: EventSQL, topic: str) -> None:
    platform.registry.register_topic(Topic("other"))
    platform.registry.register_consumer(Consumer(topic, "mailer", partitioned=True))
    platform.registry.register_consumer(Consumer("other", "[bold]odd[/bold] name"))
    everything = json.loads(run("consumer", "list", "--json").stdout)
    assert [(entry["consumer"], entry["partition"]) for entry in everything] == [
        ("mailer", 0),
        ("mailer", 1),
        ("[bold]odd[/bold] name", -1),
    ]
    assert len(json.loads(run("consumer", "list", topic, "--json").stdout)) == 2
    assert "[bold]odd[/bold] name" in run("consumer", "list").stdout


def test_pausing_and_resuming_shows(run: Run, platform: EventSQL, topic: str) -> None:
    platform.registry.register_consumer(Consumer(topic, "mailer"))

    def state() -> str:
        return str(json.loads(run("consumer", "describe", topic, "mailer", "--json").stdout)[0]["state"])

    assert state() == "active"
    assert run("consumer", "pause", topic, "mailer").exit_code == 0
    assert state() == "paused"
    assert "paused" in run("consumer", "describe", topic, "mailer").stdout
    assert run("consumer", "resume", topic, "mailer").exit_code == 0
    assert state() == "active"


def test_a_claim_shows_as_a_lease(run: Run, platform: EventSQL, topic: str) -> None:
    platform.registry.register_consumer(Consumer(topic, "mailer"))
    platform.publisher.publish(Publication(topic, b"1"))
    platform.transfer.run_once()
    platform.claims.claim(topic, "mailer", owner="run 7")
    (described,) = json.loads(run("consumer", "describe", topic, "mailer", "--json").stdout)
    assert (described["state"], described["lease_owner"]) == ("leased", "run 7")
    shown = run("consumer", "describe", topic, "mailer").stdout
    assert cell(datetime.fromisoformat(described["lease_expires_at"])) in shown
    with platform.database.connection() as connection:
        connection.execute("UPDATE eventsql.consumer SET eql_lease_expires_at = now() - interval '1 second'")
    for form in ((), ("--json",)):
        assert "run 7" not in run("consumer", "describe", topic, "mailer", *form).stdout, "its owner has it no more"


def test_a_command_that_a_message_advises_takes_any_name(run: Run, platform: EventSQL, topic: str) -> None:
    unknown = run("consumer", "describe", topic, "--", "-x y").stderr
    (advised,) = re.findall("`(eventsql consumer create [^`]*)`", unknown)
    assert run(*shlex.split(advised)[1:]).exit_code == 0
    assert [state.name for state in platform.registry.consumers(topic)] == ["-x y"]


def test_a_consumer_is_deleted(run: Run, platform: EventSQL, topic: str) -> None:
    platform.registry.register_consumer(Consumer(topic, "mailer"))
    assert run("consumer", "delete", topic, "mailer", "--execute").exit_code == 0
    assert platform.registry.consumers() == []


def test_an_event_that_was_passed_meanwhile_neither_blocks_nor_fails_its_partition() -> None:
    state = ConsumerState(
        topic="orders", name="mailer", partition=-1, last_event_id=7, consumed_events=7, last_consumption_at=None,
        paused=False, epoch=0, lease_owner=None, lease_expires_at=None, failed_event_id=8, attempts=5, failure="no",
        retry_at=None, max_attempts=5, read_at=datetime.now(UTC),
    )  # fmt: skip
    assert condition(state) == "blocked"
    assert condition(replace(state, attempts=1)) == "retrying"
    assert condition(replace(state, last_event_id=8)) == "active"


def test_erasing_is_a_plan_first_and_is_recorded(run: Run, platform: EventSQL, topic: str, tmp_path: Path) -> None:
    platform.publisher.publish_all(Publication(topic, b"secret", key=key) for key in ("ann", "bob", "carl", "ann"))
    platform.transfer.run_once()
    keys = tmp_path / "keys.txt"
    keys.write_text("carl\n\nnobody\n", encoding="utf-8")
    asked = ("topic", "erase", topic, "--key", "ann", "--key-file", keys)

    planned = run(*asked)
    assert "nothing is erased" in planned.stderr
    assert "secret" in run("tail", topic).stdout
    assert run("topic", "erasures", topic, "--json").stdout.strip() == "[]"

    done = json.loads(run(*asked, "--execute", "--requested-by", "ticket 812", "--json").stdout)
    assert (done["keys"], done["events"], done["vacuumed"], done["executed"]) == (3, 3, True, True)
    assert [each.value for each in platform.reader.read(topic)].count(b"secret") == 1
    (record,) = json.loads(run("topic", "erasures", "--key", "ann", "--json").stdout)
    assert (record["events"], record["requested_by"]) == (2, "ticket 812")
    assert "ticket 812" in run("topic", "erasures", topic).stdout


def test_an_erasure_of_a_key_without_events_says_so(run: Run, topic: str) -> None:
    planned = run("topic", "erase", topic, "--key", "nobody").stderr
    assert "nothing to erase" in planned
    assert "--execute" not in planned
    said = run("topic", "erase", topic, "--key", "nobody", "--execute").stderr
    assert "nothing to erase" in said
    assert "erasures" in said


def test_an_erasure_needs_keys(run: Run, topic: str, tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff")
    assert run("topic", "erase", topic).exit_code == 2
    for file in (tmp_path / "none", tmp_path / "bytes"):
        result = run("topic", "erase", topic, "--key-file", file, "--execute")
        assert result.exit_code == 1
        assert str(file.name) in result.stderr
