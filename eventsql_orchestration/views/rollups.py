"""Rollups: counts, sums, minima, maxima and sketches per bucket of time. Events add to them; nothing is recomputed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from decimal import Context, Decimal, Inexact
from functools import reduce
from typing import Any, Final, TypeAlias

from psycopg.rows import tuple_row

from eventsql_orchestration.boundary import checked
from eventsql_orchestration.database import CallersConnection, Connection, Database
from eventsql_orchestration.errors import ValidationError
from eventsql_orchestration.model import MAX_AGE
from eventsql_orchestration.validation import (
    age,
    check_kind,
    check_range,
    check_text,
    check_time,
    check_whole,
    shown,
)
from eventsql_orchestration.views.definitions import Rollup, floor
from eventsql_orchestration.views.rollup_sql import addition, merging, selection
from eventsql_orchestration.views.sketches import (
    Distinct,
    Quantiles,
    merge_distinct,
    merge_quantiles,
    read_distinct,
    read_quantiles,
    sketch_distinct,
    sketch_quantiles,
)
from eventsql_orchestration.views.view_table import NO_TENANT, ViewTable, check_tenant, tenants_of

MAX_DIMENSION_LENGTH: Final = 200

MAX_SLOT: Final = 2**15 - 1

_MAX_DIGITS: Final = 1_000
"""Digits of a number before and after its point: far within PostgreSQL's `numeric`."""

_FEW_BITS: Final = 64
"""A whole number of fewer bits is far from `_MAX_DIGITS`. Counting its digits would take 1 µs."""

_EXACT: Final = Context(prec=3 * _MAX_DIGITS, traps=[Inexact])
"""Adds numbers without rounding: Python's own context keeps 28 digits."""

_Added: TypeAlias = "dict[tuple[str, datetime, tuple[str, ...]], _Sums]"
"""The numbers that a call adds, by tenant, bucket and dimensions."""


@dataclass(frozen=True, slots=True)
class RollupEntry:
    """An entry that a rollup counts: a time, a text for each dimension and each `distinct`, a number for each value.

    A float is taken as it is printed. Raises `ValidationError` for an entry that cannot be stored.
    """

    at: datetime
    dimensions: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, int | float | Decimal] = field(default_factory=dict)
    distinct: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "at", check_time("at", self.at))
        for what in ("dimensions", "values", "distinct"):
            given = getattr(self, what)
            # `isinstance` with an abstract class takes 0.25 µs.
            if type(given) is not dict:
                check_kind(f"the {what} of an entry", given, Mapping)
        object.__setattr__(self, "dimensions", {name: _check_dimension(text) for name, text in self.dimensions.items()})
        object.__setattr__(self, "values", {name: _number(name, each) for name, each in self.values.items()})
        object.__setattr__(
            self, "distinct", {name: _check_distinct(name, text) for name, text in self.distinct.items()}
        )


@dataclass(frozen=True, slots=True)
class Measure:
    """A value's sum, minimum and maximum in a bucket; both bounds are None if the bucket is older than the value."""

    sum: Decimal
    min: Decimal | None
    max: Decimal | None


@dataclass(frozen=True, slots=True)
class RollupBucket:
    """The entries of the bucket of time that begins at `bucket`, for one combination of dimensions.

    `distinct` and `quantiles` are None in a bucket that is older than they are.
    """

    bucket: datetime
    dimensions: dict[str, str]
    count: int
    values: dict[str, Measure]
    distinct: dict[str, Distinct | None] = field(default_factory=dict)
    quantiles: dict[str, Quantiles | None] = field(default_factory=dict)


class _Sums:
    """What a call adds to one bucket: numbers and texts of its entries, in the order of the rollup's definition."""

    __slots__ = ("count", "measures", "numbers", "texts")

    def __init__(self, rollup: Rollup, entries: Sequence[tuple[list[Decimal], list[str]]]) -> None:
        columns = list(zip(*(numbers for numbers, _ in entries), strict=True))
        self.count = len(entries)
        self.measures = [each for column in columns for each in (reduce(_EXACT.add, column), min(column), max(column))]
        self.texts = [set(column) for column in zip(*(texts for _, texts in entries), strict=True)]
        self.numbers = [list(map(float, columns[rollup.values.index(name)])) for name in rollup.quantiles]


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
        self, connection: CallersConnection, entries: Iterable[RollupEntry],
        *, slot: int = 0, tenant: str | Sequence[str] = NO_TENANT,
    ) -> int:  # fmt: skip
        """Count entries in the caller's transaction, with one statement. Gives the number counted.

        `tenant` is the tenant of all entries, or a list with the tenant of each.

        Entries older than the rollup's retention are left out. A bucket stays locked until the transaction ends, so
        handlers that run side by side wait for each other if they share a bucket. If each handler has its own `slot`, 0
        to 32,767, it has its own part of the bucket, and reading adds the parts up. Give the events' partition.

        Transactions with one call each cannot deadlock; transactions with several calls can. Raises `ValidationError`,
        with nothing counted, for entries that cannot be stored, and `ViewNotFoundError` before the rollup is declared.
        """
        check_whole("slot", slot, least=0, most=MAX_SLOT)
        columns = [(entry.at, *self._columns(entry)) for entry in entries]
        checked = list(zip(tenants_of(tenant, len(columns)), columns, strict=True))
        with self._table.writing(connection) as joined:
            oldest = self._table.kept_after(joined)
            added = self._summed(each for each in checked if oldest is None or each[1][0] > oldest)
            if added:
                self._table.make_partitions(joined, (bucket for _, bucket, _ in added))
                self._write(joined, added, slot)
        return sum(sums.count for sums in added.values())

    def _summed(
        self, entries: Iterable[tuple[str, tuple[datetime, tuple[str, ...], list[Decimal], list[str]]]]
    ) -> _Added:
        """What entries of tenants add to each bucket."""
        by_bucket = defaultdict(list)
        for tenant, (at, dimensions, numbers, texts) in entries:
            by_bucket[tenant, floor(at, self.definition.grain), dimensions].append((numbers, texts))
        return {key: _Sums(self.definition, found) for key, found in by_bucket.items()}

    def _write(self, joined: Connection, added: _Added, slot: int) -> None:
        rollup = self.definition
        values = self._values(added, slot)
        if not rollup.sketches:
            joined.execute(addition(rollup, self._schema), values, prepare=False)
            return

        fresh = {key: _sketches(sums) for key, sums in added.items()}
        # The buckets are locked from here on, so nobody else merges sketches into them.
        cursor = joined.cursor(row_factory=tuple_row)
        rows = cursor.execute(addition(rollup, self._schema), values, binary=True, prepare=False).fetchall()
        width = 2 + len(rollup.dimensions)
        held = {(row[0], row[1], tuple(row[2:width])): row[width:] for row in rows}
        merges = [merge_distinct] * len(rollup.distinct) + [merge_quantiles] * len(rollup.quantiles)
        merged = [
            [
                new if old is None else merge([old, new])
                for merge, old, new in zip(merges, held[key], fresh[key], strict=True)
            ]
            for key in sorted(added)
        ]
        sketches = {f"sketch_{place}": list(column) for place, column in enumerate(zip(*merged, strict=True))}
        bounds = {"first": min(values["buckets"]), "last": max(values["buckets"])}
        joined.execute(merging(rollup, self._schema), values | sketches | bounds, prepare=False)

    def _values(self, added: _Added, slot: int) -> dict[str, Any]:
        """The values of the statement that adds to buckets."""
        # Buckets are locked in one order, so that two additions cannot deadlock.
        keys = sorted(added)
        values: dict[str, Any] = {
            "slot": slot, "tenants": [tenant for tenant, _, _ in keys], "buckets": [bucket for _, bucket, _ in keys],
            "counts": [added[key].count for key in keys],
        }  # fmt: skip
        for place in range(len(self.definition.dimensions)):
            values[f"dimension_{place}"] = [dimensions[place] for _, _, dimensions in keys]
        for place, (_, name) in enumerate(self.definition.measures):
            values[name] = [added[key].measures[place] for key in keys]
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
            raise ValidationError(
                f"every: {age(step)} is not a multiple of {age(rollup.grain)}, the grain of {rollup.name!r}"
            )
        if step > MAX_AGE:
            raise ValidationError(f"every: {age(step)} is not possible: use at most 100 years")
        wanted = {} if where is None else dict(where)
        for name in (*wanted, *(by or ())):
            if name not in rollup.dimensions:
                known = ", ".join(rollup.dimensions) or "none"
                raise ValidationError(f"rollup {rollup.name!r} has no dimension {shown(name)}; it has {known}")
        shown_by = [name for name in rollup.dimensions if by is None or name in by]
        values: dict[str, Any] = {
            "tenant": check_tenant(tenant), "since": since, "until": until, "every": step,
            **{f"dimension_{rollup.dimensions.index(name)}": _check_dimension(each) for name, each in wanted.items()},
        }  # fmt: skip
        query = selection(
            rollup, self._schema, tuple(shown_by), tuple(wanted), since=since is not None, until=until is not None
        )
        with self._table.reading() as connection:
            rows = connection.execute(query, values, binary=bool(rollup.sketches), prepare=False).fetchall()
        return [self._bucket_of(row, shown_by) for row in rows]

    def _bucket_of(self, row: tuple[Any, ...], by: Sequence[str]) -> RollupBucket:
        rollup = self.definition
        bucket, *rest = row
        count, *measures = rest[len(by) :]
        values = {name: Measure(*measures[3 * place : 3 * place + 3]) for place, name in enumerate(rollup.values)}
        sketches = measures[3 * len(rollup.values) :]
        distinct, quantiles = sketches[: len(rollup.distinct)], sketches[len(rollup.distinct) :]
        return RollupBucket(
            bucket, dict(zip(by, rest[: len(by)], strict=True)), count, values,
            {name: read_distinct(each) for name, each in zip(rollup.distinct, distinct, strict=True)},
            {name: read_quantiles(each) for name, each in zip(rollup.quantiles, quantiles, strict=True)},
        )  # fmt: skip

    def _columns(self, entry: RollupEntry) -> tuple[tuple[str, ...], list[Any], list[str]]:
        """The dimensions, values and distinct texts of an entry, in the order of the definition."""
        check_kind("an entry of a rollup", entry, RollupEntry)
        rollup = self.definition
        for what, given, names in (
            ("dimension", entry.dimensions, rollup.dimensions), ("value", entry.values, rollup.values),
            ("distinct text", entry.distinct, rollup.distinct),
        ):  # fmt: skip
            if set(given) != set(names):
                raise ValidationError(
                    f"an entry of rollup {rollup.name!r} needs a {what} for each of {', '.join(names) or 'none'}, "
                    f"not {shown(given)}"
                )
        return (
            tuple(entry.dimensions[name] for name in rollup.dimensions),
            [entry.values[name] for name in rollup.values],
            [entry.distinct[name] for name in rollup.distinct],
        )


def _check_dimension(dimension: str) -> str:
    if len(check_text("dimension", dimension)) > MAX_DIMENSION_LENGTH:
        raise ValidationError(
            f"dimension {dimension[:40]!r}… has {len(dimension)} characters; {MAX_DIMENSION_LENGTH} are allowed"
        )
    return dimension


def _check_distinct(name: str, text: str) -> str:
    if not check_text(f"distinct text {name}", text):
        raise ValidationError(f"distinct text {name} is empty: sketches do not count the empty text")
    return text


def _sketches(sums: _Sums) -> list[bytes]:
    """The sketches of the entries that a call adds to a bucket, in the order of the columns."""
    return [*map(sketch_distinct, sums.texts), *map(sketch_quantiles, sums.numbers)]


def _number(name: str, number: object) -> Decimal:
    """A number as it is printed: sums of decimal fractions are exact then, and additions commute."""
    if type(number) is int and number.bit_length() < _FEW_BITS:
        return Decimal(number)
    if isinstance(number, bool) or not isinstance(number, int | float | Decimal):
        raise ValidationError(f"value {name} must be a number, not {shown(number)}")
    # NumPy's floats are floats with a `repr` of their own.
    decimal = Decimal(float.__repr__(number) if isinstance(number, float) else number)
    if not decimal.is_finite() or abs(decimal.adjusted()) + len(decimal.as_tuple().digits) > _MAX_DIGITS:
        raise ValidationError(f"value {name} is {shown(number)}, which cannot be added up")
    return decimal
