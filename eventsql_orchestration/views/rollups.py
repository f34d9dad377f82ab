"""Rollups: counts, sums, minima and maxima per bucket of time. Events add to them, and nothing is recomputed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from decimal import Context, Decimal, Inexact
from functools import lru_cache
from typing import Any, Final

from psycopg import sql

from eventsql_orchestration.boundary import checked
from eventsql_orchestration.database import CallersConnection, Database
from eventsql_orchestration.errors import ValidationError
from eventsql_orchestration.validation import check_kind, check_range, check_text, check_time, check_whole, shown
from eventsql_orchestration.views.definitions import Rollup, floor
from eventsql_orchestration.views.partitions import NO_TENANT, ViewTable, check_tenant, sent

MAX_DIMENSION_LENGTH: Final = 200

MAX_SLOT: Final = 2**15 - 1

_MAX_DIGITS: Final = 1_000
"""Digits of a number before and after its point: far within PostgreSQL's `numeric`."""

_EXACT: Final = Context(prec=3 * _MAX_DIGITS, traps=[Inexact])
"""Adds numbers without rounding: Python's own context keeps 28 digits."""

_Key = tuple[datetime, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class RollupEntry:
    """An entry that a rollup counts: a time, a text for each dimension, and a number for each value.

    A float is taken as it is printed. Raises `ValidationError` for an entry that cannot be stored.
    """

    at: datetime
    dimensions: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, int | float | Decimal] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "at", check_time("at", self.at))
        for what in ("dimensions", "values"):
            check_kind(f"the {what} of an entry", getattr(self, what), Mapping)
        object.__setattr__(self, "dimensions", {name: _check_dimension(text) for name, text in self.dimensions.items()})
        object.__setattr__(self, "values", {name: _number(name, each) for name, each in self.values.items()})


@dataclass(frozen=True, slots=True)
class Measure:
    """Sum, minimum and maximum of a value in a bucket; None for the latter two if the rollup got the value later."""

    sum: Decimal
    min: Decimal | None
    max: Decimal | None


@dataclass(frozen=True, slots=True)
class RollupBucket:
    """The entries of the bucket of time that begins at `bucket`, for one combination of dimensions."""

    bucket: datetime
    dimensions: dict[str, str]
    count: int
    values: dict[str, Measure]


@dataclass(slots=True)
class _Sums:
    """The sums that a call adds to one bucket."""

    count: int
    values: list[tuple[Decimal, Decimal, Decimal]]

    def add(self, numbers: Sequence[Decimal]) -> None:
        self.count += 1
        pairs = zip(self.values, numbers, strict=True)
        self.values = [(_EXACT.add(total, new), min(low, new), max(high, new)) for (total, low, high), new in pairs]


@checked
class RollupView:
    """A declared rollup.

    Additions commute: any order and any batches give the same buckets. Adding takes the caller's connection: an event's
    handler counts it exactly once, in the transaction that moves its offset. Each `tenant` has buckets of its own.
    """

    def __init__(self, database: Database, definition: Rollup) -> None:
        self.definition = definition
        self._schema = database.schema
        self._table = ViewTable(database, definition)

    def add(
        self, connection: CallersConnection, entries: Iterable[RollupEntry], *, slot: int = 0, tenant: str = NO_TENANT
    ) -> int:
        """Count entries in the caller's transaction, with one statement. Gives the number counted.

        Entries older than the rollup's retention are left out. A bucket stays locked until the transaction ends, so
        handlers that run side by side wait for each other if they share one. If each handler has its own `slot`, 0 to
        32,767, it has its own part of the bucket, and reading adds the parts up. Give the events' partition.

        Transactions with one call each cannot deadlock; transactions with several calls can. Raises `ValidationError`,
        with nothing counted, for entries that cannot be stored, and `ViewNotFoundError` before the rollup is declared.
        """
        check_tenant(tenant)
        check_whole("slot", slot, least=0, most=MAX_SLOT)
        checked = [(entry.at, *self._columns(entry)) for entry in entries]
        if not checked:
            return 0
        with self._table.writing(connection) as joined:
            oldest = self._table.kept_after(joined)
            added = self._summed(each for each in checked if oldest is None or each[0] > oldest)
            if added:
                self._table.make_partitions(joined, (bucket for bucket, _ in added))
                statement = _addition(self.definition, self._schema)
                joined.execute(statement, self._values(added, tenant, slot), prepare=False)
        return sum(sums.count for sums in added.values())

    def _summed(self, entries: Iterable[tuple[datetime, tuple[str, ...], list[Decimal]]]) -> dict[_Key, _Sums]:
        """The sums that entries add to each bucket."""
        added: dict[_Key, _Sums] = {}
        for at, dimensions, numbers in entries:
            bucket = floor(at, self.definition.grain)
            sums = added.get((bucket, dimensions))
            if sums is None:
                added[bucket, dimensions] = _Sums(1, [(number, number, number) for number in numbers])
            else:
                sums.add(numbers)
        return added

    def _values(self, added: Mapping[_Key, _Sums], tenant: str, slot: int) -> dict[str, Any]:
        """The values of the statement that adds to buckets."""
        # Buckets are locked in one order, so that two additions cannot deadlock.
        keys = sorted(added)
        values: dict[str, Any] = {
            "tenant": tenant, "slot": slot,
            "buckets": [bucket for bucket, _ in keys], "counts": [added[key].count for key in keys],
        }  # fmt: skip
        for place in range(len(self.definition.dimensions)):
            values[f"dimension_{place}"] = [dimensions[place] for _, dimensions in keys]
        for place in range(len(self.definition.values)):
            for what, kind in enumerate(("sum", "min", "max")):
                values[f"{kind}_{place}"] = [added[key].values[place][what] for key in keys]
        return values

    def read(
        self, *, since: datetime | None = None, until: datetime | None = None, every: timedelta | None = None,
        by: Collection[str] | None = None, where: Mapping[str, str] | None = None, tenant: str = NO_TENANT,
    ) -> list[RollupBucket]:  # fmt: skip
        """The buckets with `since <= bucket < until`, by bucket and dimensions.

        `every` is the length of the buckets, a multiple of the grain, which is the default; buckets of a day begin at
        midnight in UTC. `by` are the dimensions to tell apart, all by default. `where` gives dimensions their values.
        """
        check_range(since, until)
        rollup = self.definition
        step = rollup.grain if every is None else every
        if step <= timedelta(0) or step % rollup.grain:
            raise ValidationError(f"every {step} is no multiple of the grain {rollup.grain} of rollup {rollup.name!r}")
        wanted = {} if where is None else dict(where)
        for name in (*wanted, *(by or ())):
            self._check_known("dimension", name, rollup.dimensions)
        shown_by = [name for name in rollup.dimensions if by is None or name in by]
        values: dict[str, Any] = {
            "tenant": check_tenant(tenant), "since": since, "until": until, "every": step,
            **{f"dimension_{rollup.dimensions.index(name)}": _check_dimension(each) for name, each in wanted.items()},
        }  # fmt: skip
        query = _selection(
            rollup, self._schema, tuple(shown_by), tuple(wanted), since=since is not None, until=until is not None
        )
        with self._table.reading() as connection:
            rows = connection.execute(query, values, prepare=False).fetchall()
        return [self._bucket_of(row, shown_by) for row in rows]

    def _bucket_of(self, row: tuple[Any, ...], by: Sequence[str]) -> RollupBucket:
        bucket, *rest = row
        count, *measures = rest[len(by) :]
        values = {
            name: Measure(*measures[3 * place : 3 * place + 3]) for place, name in enumerate(self.definition.values)
        }
        return RollupBucket(bucket, dict(zip(by, rest[: len(by)], strict=True)), count, values)

    def _columns(self, entry: RollupEntry) -> tuple[tuple[str, ...], list[Any]]:
        """The dimensions and the values of an entry, in the order of the definition."""
        check_kind("an entry of a rollup", entry, RollupEntry)
        rollup = self.definition
        for what, given, names in (
            ("dimension", entry.dimensions, rollup.dimensions), ("value", entry.values, rollup.values),
        ):  # fmt: skip
            if set(given) != set(names):
                raise ValidationError(
                    f"an entry of rollup {rollup.name!r} needs a {what} for each of {', '.join(names) or 'none'}, "
                    f"not {shown(given)}"
                )
        return (
            tuple(entry.dimensions[name] for name in rollup.dimensions),
            [entry.values[name] for name in rollup.values],
        )

    def _check_known(self, what: str, name: str, names: Sequence[str]) -> None:
        if name not in names:
            known = ", ".join(names) or "none"
            raise ValidationError(f"rollup {self.definition.name!r} has no {what} {shown(name)}; it has {known}")


def _check_dimension(dimension: str) -> str:
    if len(check_text("dimension", dimension)) > MAX_DIMENSION_LENGTH:
        raise ValidationError(
            f"dimension {dimension[:40]!r}… has {len(dimension)} characters; {MAX_DIMENSION_LENGTH} are allowed"
        )
    return dimension


def _number(name: str, number: object) -> Decimal:
    """A number as it is printed: sums of decimal fractions are exact then, and additions commute."""
    if isinstance(number, bool) or not isinstance(number, int | float | Decimal):
        raise ValidationError(f"value {name} must be a number, not {shown(number)}")
    # NumPy's floats are floats with a `repr` of their own.
    decimal = Decimal(float.__repr__(number) if isinstance(number, float) else number)
    if not decimal.is_finite() or abs(decimal.adjusted()) + len(decimal.as_tuple().digits) > _MAX_DIGITS:
        raise ValidationError(f"value {name} is {shown(number)}, which cannot be added up")
    return decimal


@lru_cache(maxsize=256)
def _addition(rollup: Rollup, schema: str) -> bytes:
    """The statement that adds to buckets; the arrays name each bucket once, in the order of the key.

    Composing it takes 2.4 ms, and handlers open their rollup anew for each batch.
    """
    dimensions = [sql.Identifier(name) for name in rollup.dimensions]
    measures = [
        (kind, place, sql.Identifier(f"{kind}_{name}"))
        for place, name in enumerate(rollup.values)
        for kind in ("sum", "min", "max")
    ]
    merged = {"sum": "coalesce(held.{0}, 0) + EXCLUDED.{0}", "min": "least(held.{0}, EXCLUDED.{0})",
              "max": "greatest(held.{0}, EXCLUDED.{0})"}  # fmt: skip
    statement = sql.SQL(
        "INSERT INTO {table} AS held ({columns}) "
        "SELECT %(tenant)s, added.bucket, %(slot)s, {taken} "
        "FROM {arrays} WITH ORDINALITY AS added (bucket, {names}, place) ORDER BY added.place "
        "ON CONFLICT ({key}) DO UPDATE SET {set}"
    ).format(
        table=sql.Identifier(schema, rollup.table),
        columns=_list(
            "eql_tenant", "eql_bucket", "eql_slot", *dimensions, "eql_count", *(column for _, _, column in measures)
        ),
        taken=_list(
            *(f"added.dimension_{place}" for place in range(len(dimensions))), "added.count",
            *(f"added.{kind}_{place}" for kind, place, _ in measures),
        ),
        arrays=sql.SQL("unnest({})").format(_list(
            "%(buckets)s::timestamptz[]", *(f"%(dimension_{place})s::text[]" for place in range(len(dimensions))),
            "%(counts)s::bigint[]", *(f"%({kind}_{place})s::numeric[]" for kind, place, _ in measures),
        )),
        names=_list(
            *(f"dimension_{place}" for place in range(len(dimensions))), "count",
            *(f"{kind}_{place}" for kind, place, _ in measures),
        ),
        key=_list("eql_tenant", "eql_bucket", *dimensions, "eql_slot"),
        set=_list(
            "eql_count = held.eql_count + EXCLUDED.eql_count",
            *(sql.SQL("{0} = " + merged[kind]).format(column) for kind, _, column in measures),
        ),
    )  # fmt: skip
    return sent(statement)


@lru_cache(maxsize=256)
def _selection(
    rollup: Rollup, schema: str, by: tuple[str, ...], where: tuple[str, ...], *, since: bool, until: bool
) -> bytes:
    """The statement that reads buckets, with the given conditions."""
    bucket = "date_bin(%(every)s::interval, eql_bucket, '1970-01-01 00:00+00'::timestamptz)"
    dimensions = [sql.Identifier(name) for name in by]
    conditions: list[sql.Composable] = [sql.SQL("eql_tenant = %(tenant)s")]
    conditions += [sql.SQL("eql_bucket >= %(since)s::timestamptz")] * since
    conditions += [sql.SQL("eql_bucket < %(until)s::timestamptz")] * until
    conditions += [
        sql.SQL("{} = {}").format(sql.Identifier(name), sql.Placeholder(f"dimension_{rollup.dimensions.index(name)}"))
        for name in where
    ]
    measures = [
        sql.SQL(template).format(sql.Identifier(f"{kind}_{name}"))
        for name in rollup.values
        for kind, template in (("sum", "coalesce(sum({}), 0)"), ("min", "min({})"), ("max", "max({})"))
    ]
    numbers = ", ".join(str(place + 1) for place in range(len(dimensions) + 1))
    statement = sql.SQL(
        "SELECT {columns} FROM {table} WHERE {conditions} GROUP BY {numbers} ORDER BY {numbers}"
    ).format(
        table=sql.Identifier(schema, rollup.table),
        columns=_list(bucket, *dimensions, "sum(eql_count)::bigint", *measures),
        conditions=sql.SQL(" AND ").join(conditions),
        numbers=sql.SQL(numbers),
    )
    return sent(statement)


def _list(*parts: str | sql.Composable) -> sql.Composed:
    return sql.SQL(", ").join(sql.SQL(part) if isinstance(part, str) else part for part in parts)
