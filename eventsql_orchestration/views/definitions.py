"""Definitions of views: their names, columns, retention, and the period of time of each of their partitions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar, Final, TypeAlias

from eventsql_orchestration.database.log_names import names_log
from eventsql_orchestration.errors import InvalidNameError, ValidationError
from eventsql_orchestration.validation import age, check_kind, check_text, shown

MINUTE: Final = timedelta(minutes=1)
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

LEAST_PERIOD: Final = timedelta(hours=1)
MOST_PERIOD: Final = timedelta(days=3_660)

MAX_NAME: Final = 40
"""The most characters of a view's name. The name of a partition's table also has a prefix and a time, in PostgreSQL's
63 bytes."""

MAX_COLUMNS: Final = 20

_SORT_AFTER: Final = timedelta(hours=1)
"""Time for late lines, from the end of a partition's time until the partition is sorted."""

_NAME: Final = re.compile(r"[a-z][a-z0-9_]*")
_PARTITION: Final = re.compile(r".*_p[0-9]{12}")
"""Names that end as the tables of a view's partitions do."""

_OURS: Final = ("eql_", "sum_", "min_", "max_")
"""Beginnings of the names of a rollup's other columns."""

_LANGUAGE: Final = re.compile(r"[a-z][a-z_]{0,60}")


class _Definition:
    """The fields of all views. `period` is how much time each partition holds, in whole minutes.

    Entries older than `retention` are not stored, and are dropped with their whole partition.
    """

    __slots__ = ()

    kind: ClassVar[str]
    time_of: ClassVar[str]
    """The column of the time by which entries are kept, and their partitions chosen."""

    name: str
    retention: timedelta | None
    period: timedelta

    def _check(self) -> None:
        _check_identifier(f"{self.kind} name", self.name)
        if names_log(self.name) or _PARTITION.fullmatch(self.name):
            raise InvalidNameError(
                f"{self.kind} name {self.name!r} is not usable: a topic's table or a partition may need it; choose "
                "another name"
            )
        _check_minutes("period", self.period, LEAST_PERIOD, MOST_PERIOD)
        if self.retention is not None:
            _check_minutes("retention", self.retention, MINUTE, timedelta(days=365_000))

    @property
    def table(self) -> str:
        """The name of the view's table."""
        return f"view_{self.name}"

    def described(self) -> dict[str, Any]:
        """The definition as JSON, without its name, kind, retention and period."""
        return {}


@dataclass(frozen=True, slots=True)
class Timeline(_Definition):
    """Entries of resources, read by resource in the order in which they were appended.

    A lookup of a resource looks into each partition, so it is fast with long periods. With short periods, entries are
    dropped soon after their retention.
    """

    kind: ClassVar[str] = "timeline"
    time_of: ClassVar[str] = "eql_occurred_at"

    name: str
    retention: timedelta | None = field(default=None, kw_only=True)
    period: timedelta = field(default=timedelta(days=30), kw_only=True)

    def __post_init__(self) -> None:
        self._check()


@dataclass(frozen=True, slots=True)
class Rollup(_Definition):
    """The number of entries, and sums, minima and maxima of their values, for each `grain` of time and each combination
    of dimensions.

    `distinct` names texts of entries: a bucket counts the different texts. `quantiles` names some of the `values`: a
    bucket keeps their quantiles. Both are estimates, and need the extra [sketches]; see `Distinct` and `Quantiles`.

    `dimensions`, `values` and `distinct` are names of columns: lower-case SQL identifiers.

    `indexed` names dimensions that have very many values, such as customers, of which a read chooses one by `where`: an
    index of these dimensions makes that fast, and each addition of a bucket takes more time and room.
    """

    kind: ClassVar[str] = "rollup"
    time_of: ClassVar[str] = "eql_bucket"

    name: str
    grain: timedelta
    dimensions: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    distinct: tuple[str, ...] = field(default=(), kw_only=True)
    quantiles: tuple[str, ...] = field(default=(), kw_only=True)
    indexed: tuple[str, ...] = field(default=(), kw_only=True)
    retention: timedelta | None = field(default=None, kw_only=True)
    period: timedelta = field(default=timedelta(days=30), kw_only=True)

    def __post_init__(self) -> None:
        self._check()
        _check_minutes("grain", self.grain, MINUTE, self.period)
        if self.period % self.grain:
            raise ValidationError(f"period {age(self.period)} is not a multiple of grain {age(self.grain)}")
        for what in ("dimensions", "values", "distinct", "quantiles", "indexed"):
            object.__setattr__(self, what, _check_columns(what, getattr(self, what)))
        for what, among in (("quantiles", "values"), ("indexed", "dimensions")):
            if unknown := set(getattr(self, what)) - set(getattr(self, among)):
                raise ValidationError(f"{what}: {', '.join(sorted(unknown))} not among the {among}: add them there")

    def described(self) -> dict[str, Any]:
        described: dict[str, Any] = {
            "grain": self.grain.total_seconds(), "dimensions": list(self.dimensions), "values": list(self.values),
        }  # fmt: skip
        further = {what: list(getattr(self, what)) for what in ("distinct", "quantiles", "indexed")}
        return described | {what: names for what, names in further.items() if names}

    @property
    def measures(self) -> tuple[tuple[str, str], ...]:
        """The columns of the values' sums, minima and maxima, each after its kind."""
        return tuple((kind, f"{kind}_{name}") for name in self.values for kind in ("sum", "min", "max"))

    @property
    def sketches(self) -> tuple[str, ...]:
        """The names of the columns of sketches, first the columns of `distinct`."""
        return (
            *(f"eql_distinct_{name}" for name in self.distinct),
            *(f"eql_quantiles_{name}" for name in self.quantiles),
        )


@dataclass(frozen=True, slots=True)
class Logs(_Definition):
    """Lines of resources with a level and attributes, searched by resource, time, level, attributes and text.

    `language` names a text search configuration of PostgreSQL, such as "english" or "simple": an index of words then
    makes `words` of a search fast, and each line takes more time and room to store.

    `Views.sort` rewrites each partition once in the order of resources, when its time has ended for as long as
    `sort_after` says, in whole minutes. With None, lines stay in the order in which they came.
    """

    kind: ClassVar[str] = "logs"
    time_of: ClassVar[str] = "eql_written_at"

    name: str
    language: str | None = None
    retention: timedelta | None = field(default=None, kw_only=True)
    period: timedelta = field(default=timedelta(days=1), kw_only=True)
    sort_after: timedelta | None = field(default=_SORT_AFTER, kw_only=True)

    def __post_init__(self) -> None:
        self._check()
        if self.sort_after is not None:
            _check_minutes("sort_after", self.sort_after, timedelta(), MOST_PERIOD)
        if self.language is not None and not _LANGUAGE.fullmatch(check_text("language", self.language)):
            raise ValidationError(
                f"language {shown(self.language)} is not usable: use the name of a text search configuration of "
                "PostgreSQL, such as english or simple"
            )

    def described(self) -> dict[str, Any]:
        described: dict[str, Any] = {"language": self.language}
        if self.sort_after != _SORT_AFTER:
            described["sort_after"] = None if self.sort_after is None else self.sort_after.total_seconds()
        return described


Definition: TypeAlias = Timeline | Rollup | Logs


def define(name: str, kind: str, described: Mapping[str, Any], retention: int | None, period: int) -> Definition:
    """The definition in a row of the statement `views`, whose lengths of time are in seconds."""
    common: dict[str, Any] = {"period": timedelta(seconds=period)}
    if retention is not None:
        common["retention"] = timedelta(seconds=retention)
    if kind == Timeline.kind:
        return Timeline(name, **common)
    if kind == Logs.kind:
        if "sort_after" in described:
            seconds = described["sort_after"]
            common["sort_after"] = None if seconds is None else timedelta(seconds=seconds)
        return Logs(name, language=described["language"], **common)
    grain = timedelta(seconds=described["grain"])
    for what in ("dimensions", "values", "distinct", "quantiles", "indexed"):
        common[what] = tuple(described.get(what, ()))
    return Rollup(name, grain, **common)


def start_of(view: Definition, time: datetime) -> datetime:
    """The start of the partition that has a time."""
    return floor(time, view.period)


def start_of_partition(table: str) -> datetime:
    """The start of the partition whose table has this name."""
    return datetime.strptime(table[-12:], "%Y%m%d%H%M").replace(tzinfo=UTC)


def floor(time: datetime, step: timedelta) -> datetime:
    """The last multiple of `step` since 1970 in UTC that is not after `time`."""
    try:
        return EPOCH + (time - EPOCH) // step * step
    except OverflowError:
        raise ValidationError(f"time {time} lies in a period of {age(step)} that begins before the year 1") from None


def _check_identifier(what: str, name: object) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name) > MAX_NAME:
        raise InvalidNameError(
            f"{what} {shown(name)} is not usable: use a-z, 0-9 and _, {MAX_NAME} characters at most, and begin "
            "with a letter"
        )
    return name


def _check_columns(what: str, names: Sequence[str]) -> tuple[str, ...]:
    check_kind(what, names, tuple | list)
    columns = tuple(_check_identifier(f"a name of {what}", name) for name in names)
    for name in columns:
        if name.startswith(_OURS):
            raise InvalidNameError(f"name {name!r} of {what} is not usable: it begins with one of {', '.join(_OURS)}")
    if len(columns) > MAX_COLUMNS or len(set(columns)) < len(columns):
        raise ValidationError(f"{what} {shown(columns)} are not usable: use {MAX_COLUMNS} different names at most")
    return columns


def _check_minutes(what: str, length: timedelta, least: timedelta, most: timedelta) -> None:
    check_kind(what, length, timedelta)
    if length % MINUTE or not least <= length <= most:
        raise ValidationError(
            f"{what} {age(length)} is not usable: use whole minutes, from {age(least)} to {age(most)}"
        )
