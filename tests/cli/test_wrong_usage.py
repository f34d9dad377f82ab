"""Every command refuses wrong usage with one line and changes nothing: exit code 2, or 1 where something is missing."""

from __future__ import annotations

import shlex
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from eventsql_orchestration import Consumer, EventSQL, Publication, Topic
from eventsql_orchestration.database.embedded import EmbeddedPostgres
from tests.cli.conftest import Run

LONG = "a" * 58

WRONG_USAGE = (
    # The program
    ("frobnicate", "No such command 'frobnicate'; see `eventsql --help`"),
    ("publish", "Missing argument 'TOPIC'; see `eventsql publish --help`"),
    ("lag --frequency 1", "--frequency"),
    # Options that would do nothing
    ("lag --interval 1", "--watch"),
    ("transfer --once --interval 1", "--once"),
    ("transfer --once --retain", "--once"),
    ("store list --after x", "TYPE"),
    ("store replay mailer --from now", "earliest, latest or a checkpoint"),
    ("store list --limit 5", "TYPE"),
    ("store archive order 1 --limit 5", "--closed-before"),
    ("queue send jobs --deduplication-id x", "BODY"),
    ("queue archive --drop-expired --limit 5", "--drop-expired"),
    ("queue archive --drop-expired --json", "--drop-expired"),
    ("topic list --dsn x", "--dsn stands before the command: eventsql --dsn … topic list"),
    # Topics
    *((f"topic create orders2 --partitions {number}", "partitions") for number in (0, -2, 40000, "many")),
    *((f"{command} {name}", "topic name")
      for command in ("topic create", "topic describe", "topic retain", "topic delete", "publish", "tail", "lag")
      for name in ("1st", "a-b", "'a b'", "''", LONG, "täglich")),
    ("topic create Account", "topic name"),
    ("publish Account-Created", "topic name"),
    (f"topic create {'a' * 55} --dead-letters", "topic name"),
    ("topic alter orders", "nothing to alter"),
    ("topic alter orders --keep-forever --retention-age 1d", "contradicts"),
    ("topic alter orders --retention-age soon", "duration"),
    ("topic alter orders --retention-age 0s", "above 0"),
    ("topic alter orders --retention-age 6000w", "hundred years"),
    ("topic alter orders --retention-size 0", "size in bytes"),
    ("topic alter orders --retention-size much", "not a size"),
    ("topic alter orders --retention-events 0", "--retention-events"),
    ("topic alter orders --partitions 0", "0 partitions"),
    # Consumers
    *((f"consumer create orders mailer --start {start}", "") for start in ("now", "2026-05-01T12:00:00", -1, 2**63)),
    ("consumer create orders mailer --key a --no-filter", "--no-filter"),
    ("consumer create orders mailer --metadata source", "NAME=VALUE"),
    ("consumer create orders mailer --metadata x=1 --metadata x=2", "two values"),
    ("consumer create orders mailer --key-prefix ''", "empty"),
    ("consumer create orders mailer --key b --key-prefix a", "filter"),
    ("consumer create plain mailer --partitioned", "not partitioned"),
    # Events
    *((f"tail orders --from {offset}", "") for offset in (-1, "one", "1.5", 2**63, "9" * 5_000, "²")),
    ("tail orders --grep \udcff", "--grep"),
    ("tail orders --grep (", "is not a regular expression"),
    ("tail orders --limit few", "'few' is not a valid whole number"),
    ("lag --watch --interval soon", "'soon' is not a valid number"),
    *((f"{command} --partition {number}", "out of range")
      for command in ("tail orders", "consume orders fares", "publish orders") for number in (2, -1, 40_000)),
    ("publish plain --partition 0", "not partitioned"),
    ("consume orders whole --partition 1", "not partitioned"),
    ("publish orders --file missing.jsonl", "does not exist"),
    ("publish orders --file e.txt", "no known ending"),
    ("publish orders --file e.parquet.gz", "no known ending"),
    ("publish orders --metadata source", "NAME=VALUE"),
    ("publish orders --metadata =x", "NAME=VALUE"),
    ("publish orders --metadata x=1 --metadata x=2", "two values"),
    ("publish orders --rate 0", "--rate"),
    ("publish orders --batch 0", "--batch"),
    ("publish orders --on-bad-line ignore", "--on-bad-line"),
    # Seeking
    ("seek orders fares", "exactly one of --to-earliest"),
    ("seek orders fares --to-earliest --to-latest --execute", "exactly one of"),
    ("seek orders fares --to-offset 1 --shift-by 1 --execute", "exactly one of"),
    ("seek orders fares --to-offset -1 --execute", "--to-offset"),
    (f"seek orders fares --to-offset {2**63} --execute", "offset"),
    ("seek orders fares --to-datetime 2026-05-01T12:00:00 --execute", "time zone"),
    ("seek orders fares --to-datetime yesterday --execute", "not a time"),
    ("seek orders fares --to-datetime 10m --execute", "--by-duration"),
    ("seek orders fares --by-duration '1 fortnight' --execute", "duration"),
    ("seek orders fares --by-duration 0s --execute", "above 0"),
    ("seek orders fares --by-duration 6000w --execute", "hundred years"),
    ("seek orders fares --shift-by 0 --execute", "nothing"),
    ("seek orders fares --to-latest --partition 2 --execute", "partitions 0 to 1"),
    # Dead letters
    *((f"dlt {command} orders {options}", word) for command in ("list", "redrive") for options, word in (
        ("--since 2026-01-01T02:00:00", "time zone"),
        ("--until yesterday", "nor a duration"),
        ("--since 2026-01-02T00:00:00Z --until 2026-01-01T00:00:00Z", "range of times"),
        ("--metadata source", "NAME=VALUE"),
        ("--metadata x=1 --metadata x=2", "two values"),
        ("--id 0", "--id"),
        ("--from 4 --to 2", "range of offsets"),
    )),
    # The event store
    (f"store append order 1 paid {'[' * 20_000}", "DATA is not JSON"),
    (f"store append order 1 paid '{{}}' --expected-version {'9' * 5_000}", "expected_version"),
    # Benchmarks
    *((f"bench {each}", "") for each in (
        "stream --events 0", "stream --events 2 --publishers 3", "stream --publishers 65",
        "stream --rate 100 --events 5", "stream --rate 100 --hold-xmin", "stream --seconds 5",
        "stream --shards 2 --hold-xmin", "publish --batch x", "publish --events 2 --publishers 3", "latency --rate 0",
        "transfer --short 0", "transfer --short 5 --events 5", "retention --events 1", "queue --topic --end-to-end",
        "queue --topic --ordered", "queue --topic --backlog 5", "queue --end-to-end --hold-xmin",
        "queue --end-to-end --pgmq-sql pgmq.sql", "queue --messages 3 --connections 4",
        "store --storage rows", "single --threads 31",
        "consume --partitions 40000", "consume --rounds 0", "idle --seconds 0",
        "buffered --in-flight 0", "retention --events -1", "all --retention-events 0", "dagster --cold 0",
        "dagster --drained nothing", "dagster --seconds 0", "dagster --only nothing", "latency --raw-events 5",
        "nothing",
    )),
)  # fmt: skip

MISSING = (
    *((f"topic {command} nowhere", "`eventsql topic create nowhere`") for command in ("describe", "delete")),
    ("topic alter nowhere --retention-events 9", "`eventsql topic create nowhere`"),
    ("topic describe Account", "does not exist"),
    *((f"consumer {command} orders nobody", "has no consumer 'nobody'")
      for command in ("describe", "delete", "pause", "resume")),
    *((f"consumer {command} nowhere nobody", "'nowhere'") for command in ("describe", "delete", "pause", "resume")),
    ("publish nowhere", "`eventsql topic create nowhere`"),
    ("tail nowhere", "'nowhere'"),
    ("lag nowhere", "'nowhere'"),
    ("consume nowhere fares", "'nowhere'"),
    ("consume orders nobody", "has no consumer 'nobody'"),
    ("seek nowhere fares --to-latest", "'nowhere'"),
    ("seek orders nobody --to-latest", "has no consumer 'nobody'"),
    ("dlt show orders 99", "offset 99"),
    ("dlt redrive orders --id 1 --id 98 --id 99", "98, 99"),
    *((f"dlt {command}", "`eventsql topic create plain_dlt`")
      for command in ("list plain", "show plain 1", "redrive plain")),
    *((f"dlt {command}", "'nowhere'") for command in ("list nowhere", "show nowhere 1", "redrive nowhere")),
    *((f"queue {command} nowhere", "'nowhere'")
      for command in ("describe", "receive", "peek", "purge", "redrive", "delete")),
)  # fmt: skip


@pytest.fixture(scope="module")
def filled(server: EmbeddedPostgres) -> Iterator[EventSQL]:
    """A topic with consumers, an event in each partition and a dead letter, and a topic that is not partitioned."""
    name = f"test_{uuid.uuid4().hex}"
    with EventSQL(server.create_database(name)) as platform:
        for topic in (Topic("orders", 2), Topic("orders_dlt"), Topic("plain")):
            platform.registry.register_topic(topic)
        platform.registry.register_consumer(Consumer("orders", "fares", partitioned=True))
        platform.registry.register_consumer(Consumer("orders", "whole"))
        platform.publisher.publish_all(Publication("orders", b"x", partition=number) for number in range(2))
        platform.publisher.publish(Publication("orders_dlt", b"x"))
        platform.transfer.run_once()
        yield platform
    server.drop_database(name)


def contents(platform: EventSQL) -> object:
    """Everything that a command might have changed."""
    topics = platform.registry.topics()
    ends = [(topic, topic.retention, platform.reader.end(topic.name)) for topic in topics]
    return ends, platform.registry.consumers(), platform.buffered()


@pytest.fixture(scope="module")
def before(filled: EventSQL) -> object:
    """The contents that no command may change."""
    return contents(filled)


@pytest.mark.parametrize(
    "case",
    [pytest.param((code, *row), id=row[0][:200]) for code, rows in ((2, WRONG_USAGE), (1, MISSING)) for row in rows],
)
def test_wrong_usage_is_one_line_and_changes_nothing(
    invoke: Run, filled: EventSQL, before: object, directory: Path, case: tuple[int, str, str]
) -> None:
    code, line, word = case
    for name in ("e.txt", "e.parquet.gz"):
        (directory / name).touch()
    result = invoke("--dsn", filled.database.dsn, *shlex.split(line), stdin="1\n")
    assert (result.exit_code, result.stdout) == (code, ""), result.stderr
    (message,) = result.stderr.splitlines()
    assert message.startswith("eventsql: ")
    assert word in message
    assert contents(filled) == before
