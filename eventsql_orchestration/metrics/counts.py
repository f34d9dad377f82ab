"""Counters that never go back."""

from __future__ import annotations

from collections.abc import Hashable


class Highest:
    """The highest count of each thing that a reading has.

    A count may be one batch too high for a moment: an empty log only knows the last offset that was given out.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, int] = {}

    def of(self, counts: dict[Hashable, int]) -> dict[Hashable, int]:
        """The highest count so far of each thing in `counts`; things that are gone are forgotten."""
        self._known = {key: max(count, self._known.get(key, 0)) for key, count in counts.items()}
        return self._known


class Totals:
    """Totals over parts. A part may vanish with its count, as a removed partition of a consumer does."""

    def __init__(self) -> None:
        self._parts: dict[tuple[Hashable, Hashable], int] = {}
        self._totals: dict[Hashable, int] = {}

    def of(self, counts: dict[tuple[Hashable, Hashable], int]) -> dict[Hashable, int]:
        """The total of each whole, from the counts of (whole, part); wholes that are gone are forgotten."""
        totals: dict[Hashable, int] = {}
        for (whole, part), count in counts.items():
            before = self._parts.get((whole, part), 0)
            # A part that counts less than before was made anew.
            added = count - before if count >= before else count
            totals[whole] = totals.get(whole, self._totals.get(whole, 0)) + added
        self._parts, self._totals = counts, totals
        return totals
