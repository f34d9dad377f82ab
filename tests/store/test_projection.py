"""A projection follows the store, and is computed anew beside the live tables without a gap or a double."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ClassVar

import psycopg
import pytest

from eventsql_orchestration import EventSQL
from eventsql_orchestration.database import Connection
from eventsql_orchestration.errors import DatabaseBusyError, DatabaseError, ProjectionError, ValidationError
from eventsql_orchestration.store import (
    Change,
    Filling,
    Projection,
    Projections,
    RecordedChange,
    Repository,
    Store,
    SubscriptionOptions,
)
from tests.fixtures import Sessions, UntilBlocked
from tests.store.test_order import adopted, put, restored
from tests.store.test_repository import Order, placed
from tests.waiting import PATIENCE


class Sums(Projection):
    """The sum of each aggregate's numbers, and how many there were: a gap or a double shows."""

    name = "sums"
    tables: ClassVar[Sequence[str]] = ("sums",)
    types = ("order",)

    def create(self, connection: Connection) -> None:
        connection.execute("CREATE TABLE sums (id text PRIMARY KEY, total bigint NOT NULL, changes int NOT NULL)")

    def apply(self, change: RecordedChange, connection: Connection) -> None:
        connection.execute(
            "INSERT INTO sums VALUES (%s, %s, 1) ON CONFLICT (id) DO UPDATE "
            "SET total = sums.total + excluded.total, changes = sums.changes + 1",
            [change.aggregate_id, change.data.get("n", change.data.get("price", 0))],
        )


@pytest.fixture
def store(platform: EventSQL) -> Store:
    return platform.store


@pytest.fixture
def projections(store: Store) -> Projections:
    made = Projections(store, [Sums()])
    made.install()
    return made


def sums(store: Store) -> dict[str, tuple[int, int]]:
    with store.database.connection() as connection:
        rows = connection.execute("SELECT id, total, changes FROM public.sums")
        return {each: (total, changes) for each, total, changes in rows}


def save(store: Store, projections: Projections, aggregate_id: str, *numbers: int, connection: Connection) -> None:
    """Append and project in one transaction, as a repository does."""
    version = put(store, aggregate_id, *numbers, connection=connection)
    stored = store.load("order", aggregate_id, after_version=version - len(numbers), connection=connection)
    projections.follow(stored, connection)


def spoil(store: Store) -> None:
    with store.database.connection() as connection:
        connection.execute("UPDATE public.sums SET total = -1")
        connection.execute("INSERT INTO public.sums VALUES ('nothing', 0, 0)")


def test_a_save_applies_its_changes_in_its_transaction(
    platform: EventSQL, store: Store, projections: Projections
) -> None:
    orders = Repository(store, Order, platform.publisher, projections=projections)
    order = placed()
    order.raise_price(150)
    with store.database.transaction() as connection:
        connection.execute("SET LOCAL search_path TO mine, public")
        (before,) = connection.execute("SHOW search_path").fetchone() or ()
        orders.save(order, connection=connection)
        assert connection.execute("SHOW search_path").fetchone() == (before,)
        assert sums(store) == {}
    assert sums(store)[order.id][1] == 2


def test_processes_that_install_at_once_make_each_table_once(store: Store, until_blocked: UntilBlocked) -> None:
    made: list[str] = []

    class Slow(Sums):
        def create(self, connection: Connection) -> None:
            made.append(self.name)
            super().create(connection)
            second = others.submit(Projections(store, [Slow()]).install)
            until_blocked()
            blocked.append(second)

    blocked: list[Future[None]] = []
    with ThreadPoolExecutor(1) as others:
        Projections(store, [Slow()]).install()
        blocked[0].result()
    assert made == ["sums"]


def test_a_projection_that_fails_undoes_the_save(platform: EventSQL, store: Store) -> None:
    class Broken(Sums):
        def apply(self, change: RecordedChange, connection: Connection) -> None:
            super().apply(change, connection)
            raise ValueError("no")

    projections = Projections(store, [Broken()])
    projections.install()
    with pytest.raises(ValueError, match="no"):
        Repository(store, Order, platform.publisher, projections=projections).save(placed())
    assert sums(store) == {}
    assert store.read_all() == []


class RollsBack(Sums):
    """Rolls the transaction back that it is given."""

    def apply(self, change: RecordedChange, connection: Connection) -> None:
        super().apply(change, connection)
        raise psycopg.Rollback


@pytest.mark.parametrize("joined", [False, True])
def test_a_projection_that_rolls_back_fails_the_save(
    platform: EventSQL, store: Store, sessions: Sessions, *, joined: bool
) -> None:
    projections = Projections(store, [RollsBack()])
    projections.install()
    orders = Repository(store, Order, platform.publisher, projections=projections)
    mine = sessions()
    mine.autocommit = True
    with pytest.raises(DatabaseError):
        orders.save(placed(), connection=mine if joined else None)
    assert store.read_all() == []


def test_two_installations_rebuild_projections_of_one_name_side_by_side(
    store: Store, projections: Projections, dsn: str
) -> None:
    put(store, "1", 1, 2)
    with EventSQL(dsn, schema="second", transfer=False) as platform, platform.database.connection() as connection:
        put(platform.store, "2", 3)

        class Theirs(Sums):
            schema = "theirs"

        connection.execute("CREATE SCHEMA theirs")
        others = Projections(platform.store, [Theirs()])
        others.install()
        rebuilt: list[int] = []

        def rebuild_theirs(_applied: int) -> None:
            if not rebuilt:
                rebuilt.append(others.rebuild("sums"))

        # After the first batch of the one, the other is rebuilt as a whole.
        assert projections.rebuild("sums", batch=1, on_progress=rebuild_theirs) == 2
        assert connection.execute("SELECT id, total FROM theirs.sums").fetchall() == [("2", 3)]
    assert rebuilt == [1]
    assert sums(store) == {"1": (3, 2)}


def test_a_projection_that_rolls_back_fails_its_rebuild_and_its_comparison(store: Store) -> None:
    projections = Projections(store, [RollsBack()])
    projections.install()
    put(store, "1", 1)
    with pytest.raises(DatabaseError):
        projections.rebuild("sums")
    with pytest.raises(DatabaseError):
        projections.compare("sums", {"sums": "id"})


def test_a_projection_follows_by_a_subscription(store: Store, projections: Projections) -> None:
    put(store, "1", 1, 2)
    put(store, "1", 7, of="rider")
    subscription = projections.subscribe("sums", background=False)
    assert subscription.run_once().handled == 2
    put(store, "2", 3)
    assert subscription.run_once().handled == 1
    assert sums(store) == {"1": (3, 2), "2": (3, 1)}


def test_a_change_that_a_projection_only_promises_to_apply_is_not_passed(store: Store) -> None:
    class Later(Sums):
        def apply(self, change: RecordedChange, connection: Connection) -> Any:
            return self.later()

        async def later(self) -> None: ...

    projections = Projections(store, [Later()])
    projections.install()
    put(store, "1", 1)
    assert projections.subscribe("sums", background=False).run_once().handled == 0
    assert store.subscriptions()[0].attempts == 1


@pytest.mark.parametrize("batch", [1, 2, 1_000])
def test_a_rebuild_computes_everything_anew(store: Store, projections: Projections, batch: int) -> None:
    adopted(store.database, 3)
    with store.database.transaction() as connection:
        save(store, projections, "1", 1, 2, connection=connection)
    spoil(store)
    told: list[int] = []
    assert projections.rebuild("sums", batch=batch, on_progress=told.append) == 5
    assert sums(store) == {"old 1": (1, 1), "old 2": (2, 1), "old 3": (3, 1), "1": (3, 2)}
    assert told[-1] == 5
    assert projections.rebuilds() == []
    with store.database.transaction() as connection:
        save(store, projections, "1", 5, connection=connection)
    assert sums(store)["1"] == (8, 3)


def test_a_rebuild_in_bulk_counts_the_changes_of_an_earlier_server(store: Store, projections: Projections) -> None:
    adopted(store.database, 2)
    put(store, "1", 3)
    put(store, "1", 4, of="rider")
    told: list[int] = []
    assert projections.rebuild("sums", fill=lambda _filling: put(store, "1", 5), on_progress=told.append) == 4
    assert told[0] == 3
    assert sums(store) == {"1": (5, 1)}, "apply gets only later changes"


def test_saves_that_commit_late_are_in_a_rebuilt_table_once(
    store: Store, projections: Projections, sessions: Sessions, until_blocked: UntilBlocked
) -> None:
    """Three savers: one has committed beyond the horizon, one has applied its change, one has only appended it."""
    applied, appended, foreign = sessions(), sessions(), sessions()
    foreign.execute("SELECT pg_current_xact_id()")
    save(store, projections, "1", 1, connection=applied)
    put(store, "2", 2, connection=appended)
    with store.database.transaction() as connection:
        save(store, projections, "3", 3, connection=connection)
    assert store.read_all() == []

    with ThreadPoolExecutor(2) as others:
        # The swap has as many changes left as one batch, or more.
        rebuilding = others.submit(projections.rebuild, "sums", batch=1)
        until_blocked()  # by the save that has applied its change
        last = store.load("order", "2", connection=appended)
        following = others.submit(projections.follow, last, appended)
        until_blocked(2)  # by the swap, which is first
        applied.commit()
        assert rebuilding.result(PATIENCE) == 2
        following.result(PATIENCE)
    appended.commit()
    foreign.commit()
    assert sums(store) == {"1": (1, 1), "2": (2, 1), "3": (3, 1)}
    assert projections.rebuild("sums") == 3
    assert sums(store) == {"1": (1, 1), "2": (2, 1), "3": (3, 1)}


def test_a_rebuild_in_small_batches_leaves_no_save_out_whose_transaction_began_first_and_saved_last(
    store: Store, projections: Projections, sessions: Sessions
) -> None:
    """Both saves are beyond the horizon."""
    foreign, early = sessions(), sessions()
    for each in (foreign, early):
        each.execute("SELECT pg_current_xact_id()")
    with store.database.transaction() as connection:
        save(store, projections, "2", 2, connection=connection)
    save(store, projections, "1", 1, connection=early)
    early.commit()
    assert projections.rebuild("sums", batch=1) == 2
    assert sums(store) == {"1": (1, 1), "2": (2, 1)}
    foreign.commit()


class Raised(Sums):
    """Changes the rows that are there."""

    def apply(self, change: RecordedChange, connection: Connection) -> None:
        values = [change.data["n"], change.aggregate_id]
        connection.execute("UPDATE sums SET total = total + %s, changes = changes + 1 WHERE id = %s", values)


def test_a_save_that_does_not_see_the_rows_of_a_rebuilt_table_is_refused(
    store: Store, projections: Projections, sessions: Sessions
) -> None:
    with store.database.transaction() as connection:
        save(store, projections, "1", 1, connection=connection)
    raised, mine = Projections(store, [Raised()]), sessions()
    mine.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    mine.execute("SELECT")
    projections.rebuild("sums")
    with pytest.raises(DatabaseBusyError):
        save(store, raised, "1", 2, connection=mine)
    mine.rollback()
    save(store, raised, "1", 2, connection=mine)
    mine.commit()
    assert sums(store) == {"1": (3, 2)}


def test_a_subscription_goes_on_behind_the_rebuilt_tables(
    store: Store, projections: Projections, sessions: Sessions
) -> None:
    early = sessions()
    put(store, "1", 1, 2)
    subscription = projections.subscribe("sums", background=False)
    subscription.run_once()
    put(store, "3", 5)
    put(store, "1", 3, connection=early)
    put(store, "2", 4)
    spoil(store)
    assert projections.rebuild("sums") == 3
    assert sums(store) == {"1": (3, 2), "3": (5, 1)}
    early.commit()
    assert subscription.run_once().handled == 2
    assert sums(store) == {"1": (6, 3), "2": (4, 1), "3": (5, 1)}


def test_a_swap_waits_for_the_subscription_that_is_about_to_write_the_tables(
    store: Store, projections: Projections, until_blocked: UntilBlocked
) -> None:
    class Slow(Sums):
        def apply(self, change: RecordedChange, connection: Connection) -> None:
            begun.set()
            assert may_write.wait(PATIENCE)
            super().apply(change, connection)

    begun, may_write = threading.Event(), threading.Event()
    subscription = Projections(store, [Slow()]).subscribe("sums", background=False)
    put(store, "1", 1)
    with ThreadPoolExecutor(2) as others:
        handling = others.submit(subscription.run_once)
        assert begun.wait(PATIENCE)
        rebuilding = others.submit(projections.rebuild, "sums")
        until_blocked()
        may_write.set()
        assert handling.result(PATIENCE).handled == 1
        assert rebuilding.result(PATIENCE) == 1
    assert sums(store) == {"1": (1, 1)}


def test_a_fill_ends_while_another_process_begins_the_rebuild_anew(store: Store, projections: Projections) -> None:
    """The other process has dropped the tables, and has not committed yet."""

    class Slow(Sums):
        def create(self, connection: Connection) -> None:
            super().create(connection)
            begun.set()
            assert may_commit.wait(PATIENCE)

    def fill(_filling: Filling) -> None:
        rebuilding.append(others.submit(Projections(store, [Slow()]).rebuild, "sums"))
        assert begun.wait(PATIENCE)

    begun, may_commit = threading.Event(), threading.Event()
    rebuilding: list[Future[int]] = []
    put(store, "1", 1)
    with ThreadPoolExecutor(1) as others:
        with pytest.raises(ProjectionError):
            projections.rebuild("sums", fill=fill)
        may_commit.set()
        assert rebuilding[0].result(PATIENCE) == 1
    assert sums(store) == {"1": (1, 1)}


def test_a_fill_that_another_process_has_begun_again_is_not_taken_for_whole(
    store: Store, projections: Projections
) -> None:
    def fail(_filling: Filling) -> None:
        raise ZeroDivisionError

    def fill(_filling: Filling) -> None:
        with pytest.raises(ZeroDivisionError):
            Projections(store, [Sums()]).rebuild("sums", fill=fail)

    put(store, "1", 1)
    with pytest.raises(ProjectionError, match="has begun to fill"):
        projections.rebuild("sums", fill=fill)
    assert projections.rebuild("sums") == 1
    assert sums(store) == {"1": (1, 1)}


def test_a_rebuild_applies_nothing_to_tables_that_another_process_fills(store: Store, projections: Projections) -> None:
    """The other process begins between two steps of the rebuild."""
    steps, each = projections._steps, projections._named("sums")

    def fill(_filling: Filling) -> None:
        for step in (steps.apply_batch, steps.swap):
            with pytest.raises(ProjectionError, match="fills projection 'sums' in bulk"):
                step(each, 10)
        raise ZeroDivisionError

    put(store, "1", 1)
    with pytest.raises(ZeroDivisionError):
        projections.rebuild("sums", fill=fill)


def test_an_interrupted_rebuild_goes_on_where_it_was(store: Store, projections: Projections) -> None:
    put(store, "1", *range(5))

    def stop(applied: int) -> None:
        if applied == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        projections.rebuild("sums", batch=2, on_progress=stop)
    (rebuild,) = projections.rebuilds()
    assert (rebuild.projection, rebuild.applied) == ("sums", 4)
    assert sums(store) == {}
    put(store, "1", 5)
    told: list[int] = []
    assert projections.rebuild("sums", batch=2, on_progress=told.append) == 6
    assert told[0] == 6
    assert sums(store) == {"1": (15, 6)}


def test_a_rebuild_that_has_applied_changes_goes_on_without_filling_its_tables(
    store: Store, projections: Projections
) -> None:
    put(store, "1", *range(5))
    with pytest.raises(RuntimeError):
        projections.rebuild("sums", batch=2, on_progress=_fail)
    filled: list[object] = []
    assert projections.rebuild("sums", fill=filled.append) == 5
    assert (sums(store), filled) == ({"1": (10, 5)}, [])


def test_a_rebuild_that_was_under_way_in_a_dump_begins_anew_where_the_dump_was_adopted(
    store: Store, projections: Projections
) -> None:
    put(store, "1", *range(5))
    with pytest.raises(RuntimeError):
        projections.rebuild("sums", batch=2, on_progress=_fail)
    restored(store.database)
    store.adopt()
    assert projections.rebuild("sums") == 5
    assert sums(store) == {"1": (10, 5)}


def test_a_rebuild_of_an_earlier_version_in_another_schema_begins_anew(store: Store, projections: Projections) -> None:
    put(store, "1", *range(5))
    with pytest.raises(RuntimeError):
        projections.rebuild("sums", batch=2, on_progress=_fail)
    with store.database.connection() as connection:
        connection.execute("UPDATE eventsql.store_rebuild SET eql_shadow = 'shared'")
        connection.execute("DROP SCHEMA eventsql_shadow_sums CASCADE")
    assert projections.rebuild("sums") == 5
    assert sums(store) == {"1": (10, 5)}


def test_a_rebuild_is_given_up_without_a_trace(store: Store, projections: Projections) -> None:
    put(store, "1", 1)
    with pytest.raises(RuntimeError):
        projections.rebuild("sums", on_progress=_fail)
    projections.give_up("sums")
    assert projections.rebuilds() == []
    with store.database.connection() as connection:
        assert connection.execute("SELECT FROM pg_namespace WHERE nspname ~ 'shadow'").fetchall() == []


def _fail(_applied: int) -> None:
    raise RuntimeError


def test_two_processes_do_not_rebuild_one_projection_and_none_gives_the_others_rebuild_up(
    store: Store, projections: Projections
) -> None:
    put(store, "1", 1, 2)

    class Nested(Sums):
        def apply(self, change: RecordedChange, connection: Connection) -> None:
            super().apply(change, connection)
            for other in (projections.rebuild, projections.give_up):
                with pytest.raises(ProjectionError):
                    other("sums")

    assert Projections(store, [Nested()]).rebuild("sums") == 2
    assert sums(store) == {"1": (3, 2)}


def test_rights_stay_and_views_are_not_lost(store: Store, projections: Projections) -> None:
    with store.database.connection() as connection:
        connection.execute("GRANT SELECT ON public.sums TO PUBLIC")
        connection.execute("CREATE VIEW public.totals AS SELECT total FROM public.sums")
    put(store, "1", 1)
    with pytest.raises(ProjectionError, match="views"):
        projections.rebuild("sums")
    with store.database.connection() as connection:
        connection.execute("DROP VIEW public.totals")
    assert projections.rebuild("sums") == 1
    with store.database.connection() as connection:
        granted = connection.execute("SELECT has_table_privilege('public', 'public.sums', 'SELECT')").fetchone()
    assert granted == (True,)


@pytest.mark.parametrize(
    "belonging",
    [
        "ALTER TABLE public.sums ENABLE ROW LEVEL SECURITY",
        "CREATE POLICY own ON public.sums USING (id = current_user)",
        "CREATE TRIGGER same BEFORE TRUNCATE ON public.sums EXECUTE FUNCTION suppress_redundant_updates_trigger()",
        "CREATE RULE none AS ON DELETE TO public.sums DO INSTEAD NOTHING",
        "CREATE PUBLICATION told FOR TABLE public.sums",
    ],
)
def test_a_rebuild_that_would_lose_row_security_triggers_rules_or_publications_is_refused(
    store: Store, projections: Projections, belonging: str
) -> None:
    with store.database.connection() as connection:
        connection.execute(belonging)
    put(store, "1", 1)
    with pytest.raises(ProjectionError):
        projections.rebuild("sums")
    assert sums(store) == {}


class Parts(Sums):
    """Two tables with a foreign key from one to the other."""

    tables: ClassVar[Sequence[str]] = ("sums", "part")

    def create(self, connection: Connection) -> None:
        super().create(connection)
        connection.execute("CREATE TABLE part (sum text REFERENCES sums, n int)")

    def apply(self, change: RecordedChange, connection: Connection) -> None:
        super().apply(change, connection)
        connection.execute("INSERT INTO part VALUES (%s, %s)", [change.aggregate_id, change.data["n"]])


def test_tables_that_refer_to_each_other_are_swapped_together(store: Store) -> None:
    parts = Projections(store, [Parts()])
    parts.install()
    put(store, "1", 1, 2)
    assert parts.rebuild("sums") == parts.rebuild("sums") == 2
    with store.database.connection() as connection:
        assert connection.execute("SELECT sum, n FROM public.part ORDER BY n").fetchall() == [("1", 1), ("1", 2)]


class Typed(Sums):
    def create(self, connection: Connection) -> None:
        super().create(connection)
        connection.execute("CREATE TYPE mood AS ENUM ('good')")
        connection.execute("ALTER TABLE sums ADD mood mood DEFAULT 'good'")


class Partitioned(Sums):
    def create(self, connection: Connection) -> None:
        connection.execute("CREATE TABLE sums (id text PRIMARY KEY, total bigint, changes int) PARTITION BY HASH (id)")
        connection.execute("CREATE TABLE only_part PARTITION OF sums FOR VALUES WITH (MODULUS 1, REMAINDER 0)")


@pytest.mark.parametrize("projection", [Typed(), Partitioned()])
def test_a_swap_drops_nothing_that_the_rebuilt_tables_need(store: Store, projection: Projection) -> None:
    put(store, "1", 1)
    odd = Projections(store, [projection])
    with pytest.raises(ProjectionError, match="more than its tables"):
        odd.rebuild("sums")
    odd.give_up("sums")
    assert odd.rebuilds() == []


def test_a_dead_letter_that_a_rebuild_applied_is_not_applied_again(store: Store) -> None:
    broken = {2}

    class Picky(Sums):
        def apply(self, change: RecordedChange, connection: Connection) -> None:
            if change.data["n"] in broken:
                raise ValueError("not today")
            super().apply(change, connection)

    picky = Projections(store, [Picky()])
    picky.install()
    put(store, "1", 1, 2, 3)
    subscription = picky.subscribe("sums", options=SubscriptionOptions(max_attempts=1), background=False)
    while subscription.run_once().more:
        pass
    assert len(store.dead_letters("projection sums")) == 1
    broken.clear()
    assert picky.rebuild("sums") == 3
    assert subscription.redrive() == 0
    assert sums(store) == {"1": (6, 3)}


def test_tables_that_are_not_made_are_named(store: Store) -> None:
    class Elsewhere(Sums):
        def create(self, connection: Connection) -> None:
            connection.execute("CREATE TABLE public.sums (id text)")

    with pytest.raises(ProjectionError):
        Projections(store, [Elsewhere()]).rebuild("sums")
    with store.database.connection() as connection, pytest.raises(psycopg.errors.UndefinedTable):
        connection.execute("SELECT FROM public.sums")


class Tableless(Projection):
    """A projection that names no tables."""

    name = "tableless"

    def create(self, connection: Connection) -> None: ...

    def apply(self, change: RecordedChange, connection: Connection) -> None: ...


def _without(name: str, value: Any) -> Callable[[], Projection]:
    return type("Odd", (Sums,), {name: value})


async def _never_runs(projection: Projection, change: RecordedChange, connection: Connection) -> None: ...


@pytest.mark.parametrize(
    "make",
    [
        _without("name", ""), _without("name", "n" * 60), _without("tables", ()),
        _without("tables", ("sums", "sums")), _without("types", []), _without("types", "order"),
        _without("kinds", "placed"), _without("apply", _never_runs), _without("tables", "sums"),
        _without("tables", None), Tableless,
    ],
)  # fmt: skip
def test_projections_that_cannot_be_used_are_refused(store: Store, make: Callable[[], Projection]) -> None:
    with pytest.raises(ValidationError):
        Projections(store, [make()])


def test_a_name_is_of_one_projection(store: Store) -> None:
    with pytest.raises(ValidationError):
        Projections(store, [Sums(), Sums()])
    with pytest.raises(ValidationError):
        Projections(store, [Sums()]).rebuild("other")


def test_changes_of_other_types_are_left_out(store: Store, projections: Projections) -> None:
    store.append("rider", "1", [Change("numbered", {"n": 1})], expected_version=0)
    with store.database.transaction() as connection:
        projections.follow(store.load("rider", "1"), connection)
    assert sums(store) == {}
    assert projections.rebuild("sums") == 0
    assert sums(store) == {}


# Comparing


def test_a_comparison_replays_up_to_the_place_of_the_subscription(store: Store, projections: Projections) -> None:
    adopted(store.database, 2)
    put(store, "1", 1, 2)
    put(store, "2", 3)
    put(store, "1", 7, of="rider")
    projections.subscribe("sums", background=False).run_once()
    put(store, "1", 9)
    put(store, "3", 9)
    compared = projections.compare("sums", {"sums": "id"})
    assert compared.equal
    assert (compared.aggregates, compared.changes) == (5, 5)
    assert projections.compare("sums", {"sums": "id"}, sample=2).aggregates == 2

    with store.database.connection() as connection:
        connection.execute("UPDATE public.sums SET total = 7 WHERE id = '2'")
        connection.execute("DELETE FROM public.sums WHERE id = 'old 1'")
        connection.execute("INSERT INTO public.sums VALUES ('3', 9, 1)")
    compared = projections.compare("sums", {"sums": "id"})
    assert not compared.equal
    assert compared.different == {"sums": ["2", "3", "old 1"]}
    assert sums(store)["2"] == (7, 1)


def test_a_comparison_replays_the_change_at_the_place_of_the_subscription(
    store: Store, projections: Projections
) -> None:
    put(store, "1", 1, 2)
    projections.subscribe("sums", options=SubscriptionOptions(batch=1), background=False).run_once()
    compared = projections.compare("sums", {"sums": "id"})
    assert (compared.equal, compared.changes) == (True, 1)


def test_a_comparison_leaves_out_aggregates_whose_changes_the_projection_gave_up(
    store: Store, projections: Projections
) -> None:
    def fails(change: RecordedChange, _connection: Connection) -> None:
        if change.aggregate_id == given_up:
            raise ValueError

    class Picky(Sums):
        def apply(self, change: RecordedChange, connection: Connection) -> None:
            fails(change, connection)
            super().apply(change, connection)

    for each in ("1", "2", "3"):
        put(store, each, 1)
    options, given_up = SubscriptionOptions(max_attempts=1), "1"
    subscription = Projections(store, [Picky()]).subscribe("sums", options=options, background=False)
    while subscription.run_once().more:
        pass
    given_up = "2"
    other = store.subscribe("mailer", fails, options=options, background=False)
    while other.run_once().more:
        pass
    assert [letter.aggregate_id for name in ("projection sums", "mailer") for letter in store.dead_letters(name)] == [
        "1", "2",
    ]  # fmt: skip
    compared = projections.compare("sums", {"sums": "id"})
    assert (compared.equal, compared.aggregates) == (True, 2)


def test_a_comparison_reads_names_with_a_percent_sign(store: Store) -> None:
    class Shares(Projection):
        name = "shares"
        tables = ("shares in %",)

        def create(self, connection: Connection) -> None:
            connection.execute('CREATE TABLE "shares in %" ("of %s" text PRIMARY KEY, "100%" bigint NOT NULL)')

        def apply(self, change: RecordedChange, connection: Connection) -> None:
            values = [change.aggregate_id, change.data["n"]]
            connection.execute('INSERT INTO "shares in %%" VALUES (%s, %s)', values)

    projections = Projections(store, [Shares()])
    projections.install()
    put(store, "1", 1)
    projections.rebuild("shares")
    assert projections.compare("shares", {"shares in %": "of %s"}).equal


def test_a_comparison_replays_every_change_of_a_projection_that_saves_apply(
    store: Store, projections: Projections
) -> None:
    with store.database.transaction() as connection:
        save(store, projections, "1", 1, 2, connection=connection)
    assert projections.compare("sums", {"sums": "id"}).equal
    put(store, "1", 3)
    assert projections.compare("sums", {"sums": "id"}).different == {"sums": ["1"]}


@pytest.mark.parametrize(
    ("columns", "error"),
    [({}, ValidationError), ({"other": "id"}, ValidationError), ({"sums": "no_column"}, ProjectionError)],
)
def test_columns_that_cannot_be_compared_are_refused(
    projections: Projections, columns: dict[str, str], error: type[Exception]
) -> None:
    with pytest.raises(error):
        projections.compare("sums", columns)
