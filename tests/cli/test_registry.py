"""`eventsql topic` and `eventsql consumer`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from click.testing import Result

from eventsql_orchestration import Consumer, ConsumerState, EventSQL, Publication, Topic
from eventsql_orchestration.cli.consumer import condition

Run = Callable[..., Result]


@pytest.fixture
def topic(platform: EventSQL) -> str:
    platform.registry.register_topic(Topic("account_created", partitions=2))
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


def test_a_dead_letter_topic_whose_name_would_be_too_long_leaves_nothing_behind(run: Run, platform: EventSQL) -> None:
    result = run("topic", "create", "a" * 55, "--dead-letters")
    assert result.exit_code == 2
    assert platform.registry.topics() == []


def test_partitions_change_while_a_topic_is_empty(run: Run, platform: EventSQL, topic: str) -> None:
    result = run("topic", "create", topic, "--partitions", 5)
    assert "is 5 partitions now; it was 2 partitions" in result.stderr
    platform.publisher.publish(Publication(topic, b"1"))
    result = run("topic", "create", topic, "--partitions", 6)
    assert result.exit_code == 1
    assert "it has events" in result.stderr
    assert platform.registry.topic(topic).partitions == 5


@pytest.mark.parametrize("partitions", ["0", "-2", "40000", "many"])
def test_an_impossible_number_of_partitions_is_wrong_usage(run: Run, platform: EventSQL, partitions: str) -> None:
    result = run("topic", "create", "account_created", "--partitions", partitions)
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert platform.registry.topics() == []


@pytest.mark.parametrize("name", ["Account", "1st", "a-b", "a b", "", "a" * 58, "täglich"])
def test_an_unusable_topic_name_is_wrong_usage_everywhere(run: Run, platform: EventSQL, name: str) -> None:
    for command in (["topic", "create"], ["topic", "describe"], ["topic", "delete"], ["publish"], ["tail"], ["lag"]):
        result = run(*command, name)
        assert result.exit_code == 2, command
        assert len(result.stderr.splitlines()) == 1
        assert "topic name" in result.stderr
    assert platform.registry.topics() == []


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
    refused = run("topic", "delete", topic)
    assert refused.exit_code == 1
    assert "it has events" in refused.stderr
    assert run("topic", "delete", topic, "--force").exit_code == 0
    assert platform.registry.topics() == []


@pytest.mark.parametrize("command", ["describe", "delete"])
def test_an_unknown_topic_fails(run: Run, command: str) -> None:
    result = run("topic", command, "nowhere")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("eventsql: topic 'nowhere' does not exist: ")


# Consumers


def test_a_consumer_is_created_once_and_keeps_its_attempts(run: Run, platform: EventSQL, topic: str) -> None:
    first = run("consumer", "create", topic, "mailer", "--partitioned", "--max-attempts", 9)
    assert (first.exit_code, first.stdout) == (0, "")
    again = run("consumer", "create", topic, "mailer", "--partitioned")
    assert again.exit_code == 0
    assert "exists already" in again.stderr
    assert [(s.partition, s.max_attempts) for s in platform.registry.consumer(topic, "mailer")] == [(0, 9), (1, 9)]


def test_a_consumer_can_begin_at_the_end(run: Run, platform: EventSQL, topic: str) -> None:
    platform.publisher.publish(Publication(topic, b"1"))
    platform.transfer.run_once()
    run("consumer", "create", topic, "late", "--from", "latest")
    assert platform.registry.consumer(topic, "late")[0].last_event_id == 1


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


def test_a_consumer_is_deleted(run: Run, platform: EventSQL, topic: str) -> None:
    platform.registry.register_consumer(Consumer(topic, "mailer"))
    assert run("consumer", "delete", topic, "mailer").exit_code == 0
    assert platform.registry.consumers() == []


@pytest.mark.parametrize("command", ["describe", "delete", "pause", "resume"])
def test_an_unknown_consumer_fails(run: Run, topic: str, command: str) -> None:
    result = run("consumer", command, topic, "nobody")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "has no consumer 'nobody': create it with" in result.stderr
    assert run("consumer", command, "nowhere", "nobody").exit_code == 1


def test_a_consumer_cannot_be_more_partitioned_than_its_topic(run: Run, platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("plain"))
    result = run("consumer", "create", "plain", "mailer", "--partitioned")
    assert result.exit_code == 2
    assert "topic 'plain' is not partitioned" in result.stderr
    assert platform.registry.consumers() == []


def test_an_event_that_was_passed_meanwhile_neither_blocks_nor_fails_its_partition() -> None:
    state = ConsumerState(
        topic="orders", name="mailer", partition=-1, last_event_id=7, consumed_events=7, last_consumption_at=None,
        paused=False, epoch=0, lease_owner=None, lease_expires_at=None, failed_event_id=8, attempts=5, failure="no",
        retry_at=None, max_attempts=5,
    )  # fmt: skip
    assert condition(state) == "blocked"
    assert condition(replace(state, attempts=1)) == "retrying"
    assert condition(replace(state, last_event_id=8)) == "active"
