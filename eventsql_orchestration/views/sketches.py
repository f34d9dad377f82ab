"""Sketches of rollups, of Apache DataSketches: distinct texts as theta sketches, quantiles as KLL sketches.

The union of theta sketches follows from the set of texts alone, whatever their order and batches. A KLL sketch chooses
at random which numbers it keeps, once it has more than it can keep: two sketches of the same numbers differ within
their error.
"""

from __future__ import annotations

import importlib
import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

from eventsql_orchestration.errors import DatabaseError, MissingExtraError, ValidationError
from eventsql_orchestration.validation import check_kind, shown

DISTINCT_SIZE: Final = 11
"""A sketch of distinct texts keeps 2**11 hashes of 8 bytes: exact up to 2,048 texts, then a standard error of 2.2 %."""

QUANTILE_SIZE: Final = 200
"""The k of a KLL sketch: a rank is off by at most 1.33 % in 99 of 100 cases, in some 3 KB at most."""

_KLL, _LEAST_LEVEL, _MOST_LEVELS, _EMPTY, _SINGLE = 15, 8, 60, 1, 4
"""The form of a KLL sketch: its family, the least numbers of a level, the most levels, and flags."""

_DAMAGED: Final = "a sketch of a rollup is damaged: rebuild the rollup"

_DEVIATIONS: Final = 2
"""Standard errors on each side of an estimate: the number of distinct texts is between them in 95 of 100 cases."""

_COMPARED_RANKS: Final = tuple(number / 20 for number in range(1, 20))

_TOLERATED: Final = 3
"""The ranks in two sketches of the same numbers may differ by up to this multiple of the error of a rank."""


@dataclass(frozen=True, slots=True)
class Distinct:
    """An estimate of how many different texts a bucket has, exact up to 2,048.

    The number lies between `low` and `high` in 95 of 100 cases.
    """

    estimate: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Quantiles:
    """The quantiles of `count` numbers, exact up to some 200 numbers.

    The rank of a quantile is off by at most `rank_error` in 99 of 100 cases: with 0.0133, the median lies between the
    48.67 % and the 51.33 % smallest number.
    """

    count: int
    rank_error: float
    _sketch: Any = field(repr=False, compare=False)
    _bytes: bytes = field(repr=False)

    def at(self, rank: float) -> float:
        """The number that a part `rank` of the numbers, from 0 to 1, does not exceed: 0.5 is the median.

        Raises `ValidationError` for another rank.
        """
        check_kind("rank", rank, int | float)
        if isinstance(rank, bool) or not 0 <= rank <= 1:
            raise ValidationError(f"rank must be a number from 0 to 1, not {shown(rank)}")
        return float(self._sketch.get_quantile(float(rank), True))


def sketch_distinct(texts: Iterable[str]) -> bytes:
    """A sketch of texts."""
    sketch = _library().update_theta_sketch(DISTINCT_SIZE)
    for text in texts:
        sketch.update(text)
    return merge_distinct([sketch.compact().serialize()])


def merge_distinct(sketches: Iterable[bytes]) -> bytes:
    """One sketch of the texts of several sketches."""
    library = _library()
    union = library.theta_union(DISTINCT_SIZE)
    for each in sketches:
        union.update(_read(library.compact_theta_sketch, each))
    return bytes(union.get_result().serialize())


def sketch_quantiles(numbers: Iterable[float]) -> bytes:
    """A sketch of numbers."""
    sketch = _library().kll_doubles_sketch(QUANTILE_SIZE)
    for number in numbers:
        sketch.update(number)
    return bytes(sketch.serialize())


def merge_quantiles(sketches: Iterable[bytes]) -> bytes:
    """One sketch of the numbers of several sketches."""
    return bytes(_merged_quantiles(sketches).serialize())


def read_distinct(sketches: Sequence[bytes] | None) -> Distinct | None:
    """The number of distinct texts of sketches; None without a sketch."""
    if not sketches:
        return None
    sketch = _read(_library().compact_theta_sketch, merge_distinct(sketches))
    return Distinct(
        sketch.get_estimate(), sketch.get_lower_bound(_DEVIATIONS), sketch.get_upper_bound(_DEVIATIONS)
    )  # fmt: skip


def read_quantiles(sketches: Sequence[bytes] | None) -> Quantiles | None:
    """The quantiles of sketches; None without a sketch."""
    if not sketches:
        return None
    sketch = _merged_quantiles(sketches)
    error = sketch.normalized_rank_error(False) if sketch.is_estimation_mode() else 0.0
    return Quantiles(sketch.n, error, sketch, bytes(sketch.serialize()))


def same_distinct(one: Sequence[bytes] | None, other: Sequence[bytes] | None) -> bool:
    """Whether two lists of sketches are of the same texts."""
    return merge_distinct(one or ()) == merge_distinct(other or ())


def same_quantiles(one: Sequence[bytes] | None, other: Sequence[bytes] | None) -> bool:
    """Whether two lists of sketches may be of the same numbers."""
    first, second = _merged_quantiles(one or ()), _merged_quantiles(other or ())
    if first.n != second.n or first.n == 0:
        return bool(first.n == second.n)
    tolerated = 0.0
    if first.is_estimation_mode() or second.is_estimation_mode():
        tolerated = _TOLERATED * first.normalized_rank_error(False)
    points = [sketch.get_quantile(rank, True) for sketch in (first, second) for rank in _COMPARED_RANKS]
    return all(abs(first.get_rank(point, True) - second.get_rank(point, True)) <= tolerated for point in points)


def _merged_quantiles(sketches: Iterable[bytes]) -> Any:
    library = _library()
    merged = library.kll_doubles_sketch(QUANTILE_SIZE)
    for each in sketches:
        _check_quantiles(each)
        merged.merge(_read(library.kll_doubles_sketch, each))
    return merged


def _read(kind: Any, stored: bytes) -> Any:
    """A sketch of its bytes. Raises `DatabaseError` if they are damaged."""
    try:
        return kind.deserialize(stored)
    except (ValueError, IndexError, RuntimeError, MemoryError) as error:
        raise DatabaseError(_DAMAGED) from error


def _check_quantiles(stored: bytes) -> None:
    """Raise `DatabaseError` for bytes that are not a KLL sketch of this package.

    The library checks little: some damaged sketches end the process, others can never be merged.
    """
    try:
        ints, version, family, _, size, least, _ = struct.unpack_from("<4BHBB", stored)
        known = (family, size, least) == (_KLL, QUANTILE_SIZE, _LEAST_LEVEL) and _is_sound(ints, version, stored)
    except struct.error:
        known = False
    if not known:
        raise DatabaseError(_DAMAGED)


def _is_sound(ints: int, version: int, stored: bytes) -> bool:
    """Whether a KLL sketch has as many values as its levels say, at least one, and all of them are numbers."""
    if (ints, version, len(stored)) == (2, 2, 16):
        numbers: Sequence[float] = struct.unpack_from("<d", stored, 8)
        return stored[3] & (_EMPTY | _SINGLE) == _SINGLE and not math.isnan(numbers[0])
    count, _, levels, _ = struct.unpack_from("<QHBB", stored, 8)
    ends = struct.unpack_from(f"<{levels}I", stored, 20)
    # The end of the last level is not stored: it is the room of all levels.
    room = sum(max(_LEAST_LEVEL, _room(depth)) for depth in range(levels))
    numbers = struct.unpack_from(f"<{2 + room - ends[0]}d", stored, 20 + 4 * levels) if levels else ()
    held = [after - before for before, after in pairwise((*ends, room))]
    return (
        (ints, version) == (5, 1)
        and stored[3] & (_EMPTY | _SINGLE) == 0
        and 1 <= levels <= _MOST_LEVELS
        and min(held) >= 0
        and sum(number << level for level, number in enumerate(held)) == count > 0
        and len(stored) == 20 + 4 * levels + 8 * len(numbers)
        and not any(map(math.isnan, numbers))
    )


def _room(depth: int) -> int:
    """Maximum number of values in the level of a KLL sketch that is `depth` levels below the last level."""
    thirds: int = 3**depth
    return ((QUANTILE_SIZE << depth + 1) // thirds + 1) >> 1


def _library() -> Any:
    try:
        return importlib.import_module("datasketches")
    except ModuleNotFoundError:
        raise MissingExtraError("sketches", "a rollup with distinct or quantiles") from None
