"""What the hot statements do in a log of a million events, and in a buffer that is churned.

Every statement is explained with ANALYZE where the package runs it: with its parameters, planned for its values and,
where it may be prepared, for any. What must not grow with the tables is what it visits: no segment or buffer is read
as a whole, and segments that hold nothing of what is asked for are left alone.

Filling the log takes most of the time: 5 s of processor time in both forms.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import psycopg
import pytest
from psycopg import sql
from psycopg.adapt import PyFormat, Transformer
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from eventsql_orchestration import Consumer, EventSQL, Publication, Topic
from eventsql_orchestration.consuming.dead_letters import LetterFilter
from eventsql_orchestration.database import Queries
from eventsql_orchestration.database.grants import TRIGGER
from eventsql_orchestration.model import NOT_PARTITIONED, STORAGES, Retention, Storage
from eventsql_orchestration.publishing import log_writer, low_water, publisher
from eventsql_orchestration.publishing.transfer import Transfer
from eventsql_orchestration.storage import log_form, segments
from eventsql_orchestration.storage.log_queries import LogQueries
from eventsql_orchestration.storage.metrics import LogMetrics
from eventsql_orchestration.topics.positions import AtOffset, AtTime, Earliest, Latest, Position, ShiftBy
from tests.conftest import Administrator, Prepared
from tests.plans import custom_plan, numbered

if TYPE_CHECKING:
    from tests.fixtures import SaidBy

SEGMENT: Final = segments.SEGMENT_EVENTS
FILLED: Final = 2
PER_SEGMENT: Final = 500_000
"""Events of a filled segment. It was rolled early: ids have gaps of nine times as many."""

FRESH: Final = 50_000
"""Of these, those that came since the server took its statistics."""

RARE, EMPTY = 8, 9
"""The partitions with 5 events per segment and with none."""

BEGUN: Final = 100_000
"""Events of the segment that is written to, which the server has no statistics of yet."""

END: Final = FILLED * SEGMENT + BEGUN
MIDDLE: Final = SEGMENT + PER_SEGMENT // 2
BEGINNING: Final = datetime(2026, 1, 1, tzinfo=UTC)
LETTERS: Final = 100_000
BUFFERED: Final = 300_000
BATCH: Final = 1_000

FEW: Final = 1_000
"""Events of other partitions that a read may step over, however few it gives itself."""

STEP: Final = 6
"""Blocks that finding a place in one index of one segment takes at most, with the row that is there."""


# Watching what the package runs


@dataclass(frozen=True)
class Plan:
    """How one statement was executed."""

    statement: str
    parameters: Any
    generic: bool
    root: dict[str, Any]
    in_blocks: bool
    """Whether it reads a log in blocks."""

    def nodes(self) -> Iterator[dict[str, Any]]:
        """Those that were executed at all."""
        waiting = [self.root]
        while waiting:
            node = waiting.pop()
            waiting += node.get("Plans", ())
            if node["Actual Loops"]:
                yield node

    def scans(self, relation: str) -> list[dict[str, Any]]:
        """The scans of tables whose name matches, and of their indexes."""
        return [node for node in self.nodes() if re.search(relation, node.get("Relation Name", ""))]

    @property
    def relations(self) -> set[str]:
        return {node["Relation Name"] for node in self.nodes() if "Relation Name" in node}

    @property
    def buffers(self) -> int:
        return int(self.root["Shared Hit Blocks"] + self.root["Shared Read Blocks"])

    @property
    def buffers_before_writing(self) -> int:
        """The buffers without those of a log's own pages and indexes, which grow by more at times."""
        parts = self.root["Plans"] if self.root["Node Type"] == "ModifyTable" else [self.root]
        return max(int(part["Shared Hit Blocks"] + part["Shared Read Blocks"]) for part in parts)

    @property
    def visited(self) -> float:
        """Rows of tables that were looked at, whether they were wanted or not."""
        removed = ("Rows Removed by Filter", "Rows Removed by Index Recheck")
        return float(
            sum(
                (node["Actual Rows"] + sum(node.get(name, 0) for name in removed)) * node["Actual Loops"]
                for node in self.nodes()
                if "Relation Name" in node and node["Node Type"] != "ModifyTable"
            )
        )

    def __str__(self) -> str:
        kind = "any values" if self.generic else "its values"
        lines = [
            f"{node['Node Type']} {node.get('Relation Name', '')} {node.get('Index Name', '')} "
            f"rows {node['Actual Rows']} x {node['Actual Loops']}, "
            f"removed {node.get('Rows Removed by Filter', 0)}, blocks {node['Shared Hit Blocks']}"
            f"+{node['Shared Read Blocks']} {node.get('Index Cond', '')} {node.get('Filter', '')}"
            for node in self.nodes()
        ]
        return "\n".join([f"{self.statement}, planned for {kind}: {self.parameters}", *lines])


class Watch:
    """The plans of the package's statements since it was cleared; cursors of `cursor_class` explain what they run."""

    def __init__(self) -> None:
        self.plans: list[Plan] = []
        self.names: dict[str, str] = {}
        self.on = False

    def of(self, *statements: str) -> list[Plan]:
        """The plans of these statements, each of which was run."""
        found = [plan for plan in self.plans if plan.statement in statements]
        assert {plan.statement for plan in found} == set(statements), {plan.statement for plan in self.plans}
        return found

    @contextmanager
    def watching(self) -> Iterator[Watch]:
        self.plans.clear()
        self.on = True
        try:
            yield self
        finally:
            self.on = False

    def explain(
        self, cursor: Explaining, query: Any, parameters: Any, prepare: bool | None, binary: bool | None
    ) -> None:
        name = self.names.get(query.as_string()) if self.on and isinstance(query, sql.SQL) else None
        # A COPY has no plan.
        if name is None or query.as_string().startswith("COPY"):
            return
        connection = cursor.connection
        with psycopg.Cursor(connection, row_factory=tuple_row) as own:
            with connection.transaction(force_rollback=True):
                explain = b"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) "
                own.execute(explain + query.as_bytes(), parameters, prepare=False)
                self._take(own, name, query, parameters, generic=False)
            if prepare is not False:
                with connection.transaction(force_rollback=True):
                    self._explain_generic(own, query, parameters, name)

    def _explain_generic(self, own: psycopg.Cursor[Any], query: sql.SQL, parameters: Any, name: str) -> None:
        text, names = numbered(query)
        values = [parameters[each] for each in names]
        # With the types that the driver gives them, which the plan may depend on.
        transformer = Transformer(own)
        transformer.dump_sequence(values, [PyFormat.AUTO] * len(values))
        own.connection.pgconn.prepare(b"explained", text.encode(), transformer.types)
        arguments = sql.SQL(", ").join(map(sql.Literal, values))
        own.execute("SET LOCAL plan_cache_mode TO force_generic_plan")
        own.execute(
            sql.SQL("EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) EXECUTE explained {}").format(
                sql.SQL("({})").format(arguments) if values else sql.SQL("")
            ),
            prepare=False,
        )
        self._take(own, name, query, parameters, generic=True)
        own.execute("DEALLOCATE explained")

    def _take(self, own: psycopg.Cursor[Any], name: str, query: sql.SQL, parameters: Any, *, generic: bool) -> None:
        row = own.fetchone()
        assert row is not None
        self.plans.append(Plan(name, parameters, generic, row[0][0]["Plan"], "_block" in query.as_string()))


class Explaining(psycopg.Cursor[Any]):
    """Explains each statement of the package, and undoes that, before it runs it."""

    watch: Watch

    def execute(
        self, query: Any, params: Any = None, *, prepare: bool | None = None, binary: bool | None = None
    ) -> Any:
        if self.connection.info.transaction_status in (TransactionStatus.IDLE, TransactionStatus.INTRANS):
            self.watch.explain(self, query, params, prepare, binary)
        return super().execute(query, params, prepare=prepare, binary=binary)


@pytest.fixture(scope="module")
def watch() -> Iterator[Watch]:
    """Explains what connections that are opened from here on run while it is watching."""
    watch = Watch()

    class Cursor(Explaining):
        pass

    Cursor.watch = watch
    compose = Queries.__call__

    def named(self: Queries, name: str, **identifiers: Any) -> sql.SQL:
        composed = compose(self, name, **identifiers)
        watch.names[composed.as_string()] = name
        return composed

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(psycopg, "connect", functools.partial(psycopg.connect, cursor_factory=Cursor))
        patched.setattr(Queries, "__call__", named)
        yield watch


# A log of a million events


def names_of(platform: EventSQL) -> list[str]:
    """The segments of the log, in order: those that hold events, then those that are kept ahead."""
    with platform.database.connection() as connection:
        found = segments.segments(connection, "eventsql", "orders")
    assert found is not None
    return [segment.table for segment in found]


EVENTS: Final = {
    "rows": """
        INSERT INTO {segment}
            (eql_id, eql_partition, eql_key, eql_value, eql_buffered_at, eql_created_at, eql_metadata)
        SELECT n, CASE WHEN n % 100000 = 0 THEN 8 ELSE n % 8 END, n % 1000, 'x',
               timestamptz {beginning} + n * interval '1 ms', timestamptz {beginning} + n * interval '1 ms', '{{}}'
        FROM generate_series({first}, {last}) n
        """,
    # The block of the rare partition has one event.
    "blocks": """
        INSERT INTO {segment}
            (eql_id, eql_partition, eql_events, eql_keys, eql_values, eql_buffered_at, eql_created_at)
        SELECT n, CASE WHEN events = 1 THEN 8 ELSE n / 100 % 8 END, events,
               array_fill((n % 1000)::text, ARRAY[events]), array_fill('x'::bytea, ARRAY[events]),
               timestamptz {beginning} + n * interval '1 ms', timestamptz {beginning} + n * interval '1 ms'
        FROM generate_series({first} + 99, {last}, 100) n,
             LATERAL (SELECT CASE WHEN n % 100000 = 0 THEN 1 ELSE 100 END) AS of_block (events)
        """,
}
"""Both forms of the events of a segment: every eighth in a partition, and a few in `RARE`."""

IN_BLOCK: Final = 100
"""The events of a block."""


def fill(dsn: str, number: int, storage: Storage) -> None:
    """Make a segment with its events; the indexes are built afterwards, and it is no part of the log yet."""
    start = number * SEGMENT
    known = start + PER_SEGMENT - FRESH
    insert = EVENTS[storage]
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("SET maintenance_work_mem TO '256MB'")
        for statement, first, last in (
            ("CREATE UNLOGGED TABLE {segment} (LIKE {log} INCLUDING DEFAULTS INCLUDING CONSTRAINTS)", 0, 0),
            (insert, start + 1, known),
            ("ALTER TABLE {segment} ADD PRIMARY KEY (eql_id)", 0, 0),
            ("CREATE INDEX ON {segment} (eql_partition, eql_id)", 0, 0),
            ("VACUUM (ANALYZE) {segment}", 0, 0),
            (insert, known + 1, start + PER_SEGMENT),
        ):
            connection.execute(
                sql.SQL(statement).format(
                    log=sql.Identifier("eventsql", TABLES[storage]),
                    segment=sql.Identifier("eventsql", segments.segment_name("orders", start)),
                    beginning=BEGINNING.isoformat(),
                    first=first,
                    last=last,
                )
            )


TABLES: Final = {"rows": "orders_event", "blocks": "orders_block"}
"""What holds the log."""


@pytest.fixture(scope="module", params=STORAGES)
def storage(request: pytest.FixtureRequest) -> Storage:
    """The form of the log; `check` knows it, too."""
    given: Storage = request.param
    return given


@pytest.fixture(scope="module")
def platform(administrator: Administrator, watch: Watch, storage: Storage) -> Iterator[EventSQL]:
    """The log, consumers at its start, in its middle and at its end, and dead letters."""
    with administrator.copied() as dsn, EventSQL(dsn, transfer=False) as platform:
        platform.registry.register_topic(Topic("orders", 10, storage=storage))
        platform.registry.register_topic(Topic("orders_dlt", storage="rows"))
        with platform.database.connection() as connection:
            for name in names_of(platform):
                connection.execute(sql.SQL("DROP TABLE {}").format(sql.Identifier("eventsql", name)))
        with ThreadPoolExecutor(2) as executor:
            list(executor.map(functools.partial(fill, platform.database.dsn, storage=storage), range(FILLED)))
        with platform.database.connection() as connection:
            for number in range(FILLED):
                connection.execute(
                    sql.SQL("ALTER TABLE {} ATTACH PARTITION {} FOR VALUES FROM ({}) TO ({})").format(
                        sql.Identifier("eventsql", TABLES[storage]),
                        sql.Identifier("eventsql", segments.segment_name("orders", number * SEGMENT)),
                        number * SEGMENT,
                        (number + 1) * SEGMENT,
                    )
                )
            sequence = f"eventsql.{TABLES[storage]}_eql_id_seq"
            connection.execute("SELECT setval(%s, %s)", [sequence, END - BEGUN])
            segments.ensure_ahead(connection, "eventsql", "orders")
            begun = sql.Identifier("eventsql", segments.segment_name("orders", FILLED * SEGMENT))
            connection.execute(
                sql.SQL(EVENTS[storage]).format(
                    segment=begun, beginning=BEGINNING.isoformat(), first=END - BEGUN + 1, last=END
                )
            )
            connection.execute("SELECT setval(%s, %s)", [sequence, END])
            segments.ensure_ahead(connection, "eventsql", "orders")
            connection.execute(
                """
                INSERT INTO eventsql.orders_dlt_event (eql_partition, eql_key, eql_value, eql_buffered_at, eql_metadata)
                SELECT -1, n %% 1000, 'x', now(),
                       json_build_object('dlt_consumer', 'first', 'dlt_exception', 'ValueError', 'dlt_topic', 'orders')
                FROM generate_series(1, %s) n
                """,
                [LETTERS],
            )
            connection.execute(
                "INSERT INTO eventsql.redriven_dead_letter (eql_topic, eql_letter_id) "
                "SELECT 'orders_dlt', n FROM generate_series(1, %s) n",
                [LETTERS // 2],
            )
        for consumer, offset in (("first", 0), ("middle", MIDDLE), ("last", END)):
            for partitioned in (True, False):
                name = consumer if partitioned else f"{consumer}_whole"
                platform.registry.register_consumer(Consumer("orders", name, partitioned=partitioned))
                platform.seeker.execute("orders", name, AtOffset(offset + 1))
        with platform.database.connection() as connection:
            connection.execute(
                "INSERT INTO eventsql.consumer (eql_topic, eql_name, eql_partition, eql_consumed_events) "
                "SELECT 'topic ' || n / 10, 'mailer', n % 10, 0 FROM generate_series(1, 5000) n"
            )
            connection.execute("VACUUM (ANALYZE) eventsql.orders_dlt_event, eventsql.redriven_dead_letter")
            connection.execute("ANALYZE eventsql.consumer, eventsql.topic, eventsql.consumer_claim")
        yield platform


def check(plan: Plan, allowed: set[str], *, rows: int, steps: int) -> None:
    """Assert that the statement read by its indexes, of these segments alone, and visited about as much as it gave.

    `rows` are the events that it gives or counts, `steps` the places in indexes that it may have to find.
    """
    if plan.in_blocks:
        # Each event might have a block of its own, and a block may end 20,000 offsets behind a range.
        rows += 20_000 // IN_BLOCK + 2
    touched = {name for name in plan.relations if "_segment_" in name}
    assert touched <= allowed, f"{sorted(touched - allowed)} hold nothing of it:\n{plan}"
    for node in plan.scans("_segment_"):
        assert "Seq Scan" not in node["Node Type"], str(plan)
    # Where only few events are left, stepping over those of other partitions is as good as the index of this one.
    others = max(9 * rows, FEW) if "partition" in plan.statement else 0
    assert plan.visited <= rows + steps + others, str(plan)
    # Neighbours in the log lie in the same blocks, those of one of its partitions may lie in blocks of their own.
    assert plan.buffers <= STEP * (steps + 1) + 2 * rows + others // 10, str(plan)


def within(platform: EventSQL, after: int, upto: int) -> set[str]:
    """The segments with a part of a range of ids."""
    return {
        name
        for number, name in enumerate(names_of(platform))
        if number * SEGMENT <= upto and (number + 1) * SEGMENT > after + 1
    }


PLACES: Final = {
    "start": 0, "middle": MIDDLE, "end of a segment": PER_SEGMENT - 10, "without statistics": END - BEGUN + 10_000,
    "end": END - 500, "nothing": END,
}  # fmt: skip
PARTITIONS: Final = {"whole": None, "ordinary": 3, "rare": RARE, "empty": EMPTY}


def reads_of_partition(watch: Watch) -> list[Plan]:
    """Blocks are read within a window of ids first."""
    return watch.of(*({"read_window", "read_partition"} & {plan.statement for plan in watch.plans}))


@pytest.mark.parametrize("partition", PARTITIONS.values(), ids=PARTITIONS)
@pytest.mark.parametrize("after", PLACES.values(), ids=PLACES)
def test_reading_visits_what_it_gives(platform: EventSQL, watch: Watch, after: int, partition: int | None) -> None:
    with watch.watching():
        read = platform.reader.read("orders", after=after, partition=partition, limit=BATCH)
    last = read[-1].id if len(read) == BATCH else 2**63
    allowed = within(platform, after, last)
    for plan in watch.of("read") if partition is None else reads_of_partition(watch):
        if plan.in_blocks and after == PLACES["without statistics"]:
            # Few blocks are sorted instead of walked in order: the empty segments ahead are looked into, too.
            allowed |= set(names_of(platform)[FILLED:])
        check(plan, allowed, rows=len(read), steps=len(names_of(platform)))


@pytest.mark.parametrize("partition", PARTITIONS.values(), ids=PARTITIONS)
def test_reading_a_range_leaves_the_segments_around_it_alone(
    platform: EventSQL, watch: Watch, partition: int | None
) -> None:
    with watch.watching():
        read = platform.reader.read("orders", after=MIDDLE, upto=MIDDLE + 5_000, partition=partition)
        assert platform.reader.count("orders", after=MIDDLE, upto=MIDDLE + 5_000, partition=partition) == len(read)
    suffix = "" if partition is None else "_partition"
    for plan in watch.of(f"read{suffix}", f"count{suffix}"):
        check(plan, within(platform, MIDDLE, MIDDLE + 5_000), rows=len(read), steps=1)


@pytest.mark.parametrize("partition", PARTITIONS.values(), ids=PARTITIONS)
def test_the_end_of_a_log_is_found_in_a_step_for_each_segment(
    platform: EventSQL, watch: Watch, partition: int | None
) -> None:
    with watch.watching():
        platform.reader.end("orders", partition)
    (plan,) = watch.of("end" if partition is None else "end_partition")
    check(plan, set(names_of(platform)), rows=1, steps=len(names_of(platform)))


@pytest.mark.parametrize("partition", PARTITIONS.values(), ids=PARTITIONS)
@pytest.mark.parametrize("after", PLACES.values(), ids=PLACES)
def test_the_oldest_event_after_an_offset_is_one_step(
    platform: EventSQL, watch: Watch, after: int, partition: int | None
) -> None:
    with watch.watching():
        platform.reader.seconds_behind("orders", after=after, partition=partition)
    (plan,) = watch.of("oldest" if partition is None else "oldest_partition")
    check(plan, within(platform, after, 2**63), rows=1, steps=len(names_of(platform)))


@pytest.mark.parametrize("partitions", [(3, RARE, EMPTY), (NOT_PARTITIONED,)], ids=["partitions", "whole"])
@pytest.mark.parametrize("after", PLACES.values(), ids=PLACES)
def test_the_lag_is_a_step_for_each_partition_and_segment_and_one_for_each_counted_event(
    platform: EventSQL, watch: Watch, after: int, partitions: tuple[int, ...]
) -> None:
    logs, count = LogMetrics("eventsql"), len(names_of(platform))
    with watch.watching(), platform.database.connection() as connection:
        ends = logs.ends(connection, "orders", partitions)
        waiting = logs.waiting(connection, "orders", [(each, after) for each in partitions], ends)
    rows, steps = sum(each.events for each in waiting.values()), len(partitions) * count
    for plan in watch.of("waiting") if rows else []:
        check(plan, within(platform, after, 2**63), rows=2 * rows + 1, steps=2 * steps)
    for plan in watch.of("ends"):
        check(plan, set(names_of(platform)), rows=len(partitions), steps=steps)


# Consuming


WHERE: Final = {"first": 0, "middle": MIDDLE, "last": END}


@contextmanager
def undone(platform: EventSQL) -> Iterator[None]:
    """Consumers are where they were when the block has ended."""
    with platform.database.connection() as connection:
        connection.execute("CREATE TEMPORARY TABLE before AS TABLE eventsql.consumer")
        try:
            yield
        finally:
            connection.execute(
                "UPDATE eventsql.consumer c SET eql_last_event_id = b.eql_last_event_id, eql_lease_owner = NULL, "
                "eql_lease_expires_at = NULL FROM before b "
                "WHERE (c.eql_topic, c.eql_name, c.eql_partition) = (b.eql_topic, b.eql_name, b.eql_partition)"
            )
            connection.execute("DELETE FROM eventsql.consumer_claim")
            connection.execute("DROP TABLE before")


@pytest.mark.parametrize("partition", [3, RARE, EMPTY, NOT_PARTITIONED], ids=["ordinary", "rare", "empty", "whole"])
@pytest.mark.parametrize("place", WHERE)
def test_a_pass_and_a_claim_visit_what_they_take(platform: EventSQL, watch: Watch, place: str, partition: int) -> None:
    whole = partition == NOT_PARTITIONED
    consumer = f"{place}_whole" if whole else place
    suffix = "" if whole else "_partition"
    with undone(platform), watch.watching():
        claim = platform.claims.claim("orders", consumer, partition, owner="me", max_events=BATCH)
        locks = watch.of("lock_consumer")
        waiting = watch.of(f"waiting{suffix}")
    with undone(platform), watch.watching():
        taken = platform.consumers.consume_once(
            "orders", consumer, lambda *_: None, partition=partition, max_events=BATCH
        )
        locks += watch.of("lock_consumer")
        read = watch.of("read") if whole else reads_of_partition(watch)
        moved = watch.of("advance") if taken else []
    assert taken == getattr(claim, "events", 0)
    for plan in waiting + read:
        check(plan, within(platform, WHERE[place], 2**63), rows=taken, steps=len(names_of(platform)))
    for plan in locks + moved:
        assert "consumer_pkey" in {node.get("Index Name") for node in plan.nodes()}, str(plan)
        assert plan.buffers <= 40, str(plan)


def look(platform: EventSQL, watch: Watch, statement: str, consumer: str, asked: dict[int, int]) -> list[Plan]:
    """The plans of a look: `_ready` runs it below the driver's cursors."""
    each = list(asked) if max(asked.values()) > 1 else None
    least = None if each is None else list(asked.values())
    values = {"topic": "orders", "consumer": consumer, "partitions": each, "least": least}
    with platform.database.connection() as connection, watch.watching():
        connection.execute(LogQueries("consumers", "eventsql").on(connection, statement, "orders"), values)
    return watch.of(statement)


@pytest.mark.parametrize("least", [1, 500])
@pytest.mark.parametrize("place", WHERE)
def test_the_look_for_partitions_with_events_is_a_step_for_each_and_each_segment(
    platform: EventSQL, watch: Watch, place: str, least: int
) -> None:
    count, consumers = len(names_of(platform)), platform.shards[0].consumers
    asked = dict.fromkeys(range(10), least)
    for plan in look(platform, watch, "ready", place, asked):
        check(plan, within(platform, WHERE[place], 2**63), rows=10 * least, steps=10 * count + 10)
    ordinary = set(range(8)) | ({RARE} if least == 1 else set())
    ready = consumers._ready("orders", place, asked, partitioned=True)
    assert set(ready) == (set() if place == "last" else ordinary)
    for plan in look(platform, watch, "ready_topic", f"{place}_whole", {NOT_PARTITIONED: least}):
        check(plan, within(platform, WHERE[place], 2**63), rows=least, steps=count + 1)
    found = consumers._ready("orders", f"{place}_whole", {NOT_PARTITIONED: least}, partitioned=False)
    assert found == ({} if place == "last" else {NOT_PARTITIONED: 0.0})


# Seeking


POSITIONS: Final = [
    Earliest(), Latest(), AtOffset(MIDDLE), AtOffset(PER_SEGMENT + 1_000),
    *(AtTime(BEGINNING + timedelta(milliseconds=each)) for each in (-1, 1, MIDDLE, PER_SEGMENT + 1_000, END, END + 1)),
    ShiftBy(500), ShiftBy(-500),
]  # fmt: skip


@pytest.mark.parametrize("position", POSITIONS, ids=str)
@pytest.mark.parametrize("consumer", ["middle", "middle_whole"])
def test_a_position_is_found_in_steps(platform: EventSQL, watch: Watch, consumer: str, position: Position) -> None:
    with watch.watching(), pytest.MonkeyPatch.context() as patched:
        # What lies between two places is counted, which takes as long as there is.
        patched.setattr(platform.reader, "count", lambda *_, **__: 0)
        patched.setattr(platform.shards[0].seeker._reader, "count", lambda *_, **__: 0)
        platform.seeker.plan("orders", consumer, position)
    count = len(names_of(platform))
    plans = [plan for plan in watch.plans if plan.scans("_segment_")]
    assert plans
    for plan in plans:
        rows = 500 if plan.statement.startswith("nth") else 0
        if plan.in_blocks and rows:
            # It looks twice at the blocks that may end behind the place.
            rows += 20_000 // IN_BLOCK
        # A bisection has one step for each halving of the ids, in one segment or in several where that one is rolled.
        steps = 64 * count if plan.statement == "before_time" else 2 * count
        check(plan, set(names_of(platform)), rows=rows, steps=steps)


# Retention


def test_retention_finds_what_segments_hold_in_steps(platform: EventSQL, watch: Watch) -> None:
    platform.registry.set_retention("orders", Retention(events=10**12))
    with watch.watching():
        platform.retention.run_once(["orders"])
    # The events of blocks are counted, without their arrays.
    counted = ["estimate"] if platform.registry.topic("orders").storage == "rows" else []
    for plan in watch.of("first", "last", *counted):
        assert not any("Seq Scan" in node["Node Type"] for node in plan.scans("_segment_")), str(plan)
        assert plan.buffers <= 4 * STEP, str(plan)


def test_retention_asks_in_steps_whether_consumers_have_passed_a_segment(platform: EventSQL, watch: Watch) -> None:
    query = LogQueries("segments", "eventsql")
    with watch.watching(), platform.database.connection() as connection:
        for number, name in enumerate(names_of(platform)[:FILLED]):
            connection.execute(
                query("unpassed", table=name),
                {"topic": "orders", "newest": number * SEGMENT + PER_SEGMENT},
                prepare=False,
            )
    consumers = 33
    for plan in watch.of("unpassed"):
        assert not any("Seq Scan" in node["Node Type"] for node in plan.scans("_segment_")), str(plan)
        assert plan.buffers <= STEP * consumers, str(plan)


# Dead letters


def test_dead_letters_are_found_by_their_ids(platform: EventSQL, watch: Watch) -> None:
    letters = "_dlt_.*_segment_"
    with watch.watching():
        platform.dead_letters.show("orders", LETTERS // 2)
        platform.dead_letters.list("orders", LetterFilter(ids=(1, LETTERS // 2, LETTERS)))
        platform.dead_letters.list("orders", limit=10)
        platform.dead_letters.plan_redrive("orders", LetterFilter(ids=(1, LETTERS)))
        platform.dead_letters.prune("orders")
    assert watch.plans
    for plan in watch.of("letters", "unknown", "matching", "prune"):
        assert plan.scans(letters), str(plan)
        assert not any("Seq Scan" in node["Node Type"] for node in plan.scans(letters)), str(plan)
        assert plan.visited <= 100, str(plan)
        assert plan.buffers <= 200, str(plan)


# Statements


def test_a_batch_takes_the_same_few_statements_however_large_it_is(platform: EventSQL, said_by: SaidBy) -> None:
    with platform.database.connection() as connection:
        log_form.form_now(connection, "eventsql", "orders")
    for events in (10, 5_000):
        with undone(platform), EventSQL(platform.database.dsn, transfer=False) as process:
            said = said_by(process.database)
            process.consumers.consume_once("orders", "middle", lambda *_: None, partition=3, max_events=events)
            # After what finds out which partitions there are.
            # The reading of blocks begins with WITH.
            verbs = " ".join(said.verbs()).replace("WITH", "SELECT")
            assert verbs.endswith(" BEGIN SELECT SELECT UPDATE COMMIT")
            process.claims.claim("orders", "middle", 3, owner="me", max_events=events)
            # Limits, lock, what waits; the last claim, this one, its lease.
            assert " ".join(said.verbs()) == "BEGIN SELECT SELECT SELECT UPDATE INSERT UPDATE COMMIT"


# The buffer


TOPICS: Final = 200


def fill_buffer(platform: EventSQL) -> None:
    """Flood the buffer with one topic, with few events of another and one of a third, among many topics."""
    for topic in (Topic("flood"), Topic("orders", 10), Topic("rare")):
        platform.registry.register_topic(topic)
    with platform.database.connection() as connection:
        connection.execute(
            "INSERT INTO eventsql.event_buffer_lock SELECT 'idle ' || n FROM generate_series(4, %s) n", [TOPICS]
        )
        connection.execute(
            """
            INSERT INTO eventsql.event_buffer (eql_topic, eql_partition, eql_value, eql_metadata)
            SELECT CASE WHEN n = %s THEN 'rare' WHEN n %% 1000 = 0 THEN 'orders' ELSE 'flood' END, -1, 'x', '{}'
            FROM generate_series(1, %s) n
            """,
            [BUFFERED - 1, BUFFERED],
        )


@pytest.fixture(scope="module", params=[False, True], ids=["not analyzed", "analyzed"])
def buffered(
    administrator: Administrator, prepared: Prepared, watch: Watch, request: pytest.FixtureRequest
) -> Iterator[EventSQL]:
    """A flooded buffer."""
    with (
        administrator.copied(template=prepared(fill_buffer)[0]) as dsn,
        EventSQL(dsn, transfer=False) as platform,
        pytest.MonkeyPatch.context() as patch,
    ):
        # What is decided is known to the last batch, so that the pages read are those of the batch.
        patch.setattr(low_water, "OBSERVE_SECONDS", -1.0)
        if request.param:
            with platform.database.connection() as connection:
                connection.execute("ANALYZE eventsql.event_buffer, eventsql.event_buffer_lock, eventsql.topic")
        yield platform


def check_buffer(plan: Plan, *, rows: int, blocks: int) -> None:
    for node in plan.scans("^event_buffer$"):
        if node["Node Type"] != "ModifyTable":
            assert node["Node Type"] != "Seq Scan", str(plan)
    visited = sum(
        (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"]
        for node in plan.scans("^event_buffer$")
        if node["Node Type"] != "ModifyTable"
    )
    assert visited <= rows, str(plan)
    assert plan.buffers_before_writing <= blocks, str(plan)


def test_a_round_of_the_transfer_visits_what_it_moves(buffered: EventSQL, watch: Watch) -> None:
    transfer = Transfer(buffered.database, batch=BATCH)
    stop = threading.Event()
    with watch.watching():
        transfer.run(stop, on_moved=lambda _: stop.set())
    transfer.close()
    for plan in watch.of("look"):
        check_buffer(plan, rows=TOPICS, blocks=STEP * TOPICS)
    for plan in watch.of("lock_topic"):
        check_buffer(plan, rows=0, blocks=2 * STEP)
    ends, moves = watch.of("batch_end"), watch.of("move")
    # Each is planned twice: for its values, and for any values.
    assert len(ends) == len(moves) == 2 * 3
    for end in ends:
        check_buffer(end, rows=BATCH + 10, blocks=STEP + BATCH)
    for move in moves:
        moved = next(node["Actual Rows"] for node in move.nodes() if node.get("Subplan Name") == "CTE moved")
        # Each is deleted, and inserted with its entries in the indexes of the log.
        check_buffer(move, rows=2 * moved + 10, blocks=20 * moved + 100)


def test_a_batch_begins_where_its_topic_does_though_statistics_say_that_it_floods_the_buffer(
    buffered: EventSQL, watch: Watch
) -> None:
    """They are as old as the last ANALYZE, and topics take turns in flooding."""
    queries = LogQueries("append", "eventsql")
    values = {"topic": "flood", "low_water": 0, "newest": 2**62, "limit": BATCH}
    state = {**values, "events": 0, "trigger": TRIGGER}
    with buffered.database.connection() as connection, connection.transaction(force_rollback=True):
        connection.execute(
            "UPDATE eventsql.event_buffer SET eql_topic = 'orders' WHERE eql_topic = 'flood' AND eql_id < %s",
            [BUFFERED - 100],
        )
        with watch.watching():
            connection.execute(queries("batch_end", topic="flood"), values, prepare=False)
            connection.execute(queries("append_state", topic="flood"), state, prepare=False)
            connection.execute(Queries("log", "eventsql")("look"), {"marked": [], "low_waters": [], "wanted": None})
    for plan in watch.of("batch_end", "append_state", "look"):
        # Those that the update deleted may be stepped over, the others are none of this topic's.
        check_buffer(plan, rows=BATCH, blocks=BUFFERED)


def test_moving_looks_for_the_next_block_among_blocks_alone(buffered: EventSQL, watch: Watch) -> None:
    """The statistics know of no block."""
    transfer = Transfer(buffered.database, batch=BATCH)
    with buffered.database.connection() as connection:
        connection.execute(
            "INSERT INTO eventsql.event_buffer "
            "(eql_topic, eql_partition, eql_value, eql_metadata, eql_events, eql_block_partition, eql_values) "
            "SELECT 'orders', -3, '', '{}', 1, n % 10, ARRAY['x'::bytea] FROM generate_series(1, 500) n"
        )
    stop = threading.Event()
    with watch.watching():
        transfer.run(stop, on_moved=lambda _: stop.set())
    transfer.close()
    for plan in watch.of("first_row"):
        # What other tests rolled back is stepped over.
        check_buffer(plan, rows=1, blocks=BUFFERED)
    for plan in watch.of("move"):
        indexes = {node.get("Index Name") for node in plan.scans("^event_buffer$")}
        assert "event_buffer_blocks" in indexes, str(plan)
    (blocks,) = watch.of("move_blocks")
    # The next event, the blocks and their sizes, and each block once more to take it out.
    check_buffer(blocks, rows=4 * 500, blocks=BUFFERED)


def test_blocks_and_the_rows_that_stand_for_them_are_found_by_their_ids(buffered: EventSQL) -> None:
    values = {
        "topic": "orders", "low_water": 0, "upto": 2**62, "most": 16, "size": 2**26, "partitions": 3, "reference": -3,
    }  # fmt: skip
    with buffered.database.connection() as connection, connection.transaction(force_rollback=True):
        connection.execute(
            "INSERT INTO eventsql.spark_staged_event "
            "(eql_attempt, eql_position, eql_topic, eql_partition, eql_value, eql_metadata, eql_values, eql_buffer_id) "
            "SELECT gen_random_uuid(), 0, 'orders', 0, '', '{}', ARRAY['x'::bytea], n FROM generate_series(1, 5000) n"
        )
        plan = custom_plan(connection, LogQueries("append", "eventsql")("move_blocks", topic="orders"), values)
    assert "Seq Scan on event_buffer" not in plan
    assert "Seq Scan on spark_staged_event" not in plan


def test_a_publisher_finds_its_topic_and_what_lies_in_its_buffer(buffered: EventSQL, watch: Watch) -> None:
    publish = Queries("log", "eventsql")("publish")
    event = {"partitions": 10, "layout": 1, "partition": 0, "key": None, "value": b"x", "metadata": "{}"}
    with watch.watching():
        for topic in ("flood", "orders", "rare"):
            with buffered.database.connection() as connection:
                connection.execute(publish, {"topic": topic, **event})
            buffered.publisher.publish_all([Publication(topic, b"x")] * 2)
            buffered.publisher.publish_all([Publication(topic, b"x")] * publisher.STRAIGHT_LEAST)
    for plan in watch.of("publish", "redefined_topics", "await_topic"):
        assert plan.buffers <= 60, str(plan)
    # A flood is looked at as far as the first event that is too many to move.
    for plan in watch.of("append_state"):
        check_buffer(plan, rows=log_writer.MOST_BUFFERED + 1, blocks=2 * log_writer.MOST_BUFFERED + 100)
    rare = [plan for plan in watch.of("append_state") if plan.parameters["topic"] == "rare"]
    for plan in rare:
        check_buffer(plan, rows=10, blocks=60)


def test_a_transfer_does_not_step_over_what_it_moved_while_an_old_transaction_keeps_it(
    buffered: EventSQL, watch: Watch
) -> None:
    transfer = Transfer(buffered.database)
    churn = """
        INSERT INTO eventsql.event_buffer (eql_topic, eql_partition, eql_value, eql_metadata)
        SELECT 'orders', n % 10, 'x', '{}' FROM generate_series(1, 5000) n
        """
    with buffered.database.dedicated() as keeping, buffered.database.connection() as connection:
        keeping.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        keeping.autocommit = False
        keeping.execute("SELECT count(*) FROM eventsql.topic").fetchone()
        for _ in range(8):
            connection.execute(churn)
            transfer.run_once(["orders"])
        connection.execute(
            "INSERT INTO eventsql.event_buffer (eql_topic, eql_partition, eql_value, eql_metadata) "
            "VALUES ('orders', 1, 'x', '{}')"
        )
        with watch.watching():
            assert transfer.run_once(["orders"]) == {"orders": 1}
        for plan in watch.of("look", "batch_end", "move"):
            check_buffer(plan, rows=2, blocks=60)
        with watch.watching():
            connection.execute(
                LogQueries("append", "eventsql")("batch_end", topic="orders"),
                {"topic": "orders", "low_water": 0, "newest": 2**62, "limit": BATCH},
                prepare=False,
            )
        (without_a_mark,) = watch.of("batch_end")
        assert without_a_mark.buffers > 200, "nothing kept what was moved: this proves nothing"
    transfer.close()
