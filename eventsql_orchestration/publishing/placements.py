"""Where the events of a batch are. Offsets are found only if somebody asks for one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

from eventsql_orchestration.model import Placement


class Appended(NamedTuple):
    """Events of one partition to which an append gave consecutive ids."""

    partition: int
    first: int
    events: int


class Placements:
    """The placements of the events of one batch, by their number in it."""

    def __init__(self) -> None:
        self._partitions: list[int] = []
        self._appended: Sequence[Appended] = ()
        self._offsets: list[int] | None = None

    def noted(self, partitions: Iterable[int]) -> list[int]:
        """Note the partitions of all events, for a new attempt, and return them."""
        self._partitions = list(partitions)
        return self._partitions

    def appended(self, appended: Sequence[Appended]) -> None:
        """Note the ids that the events of each partition got, in their order."""
        self._appended = appended

    def __getitem__(self, number: int) -> Placement:
        if self._appended and self._offsets is None:
            ranges: defaultdict[int, list[range]] = defaultdict(list)
            for partition, first, events in self._appended:
                ranges[partition].append(range(first, first + events))
            ids = {partition: chain.from_iterable(of) for partition, of in ranges.items()}
            self._offsets = [next(ids[partition]) for partition in self._partitions]
        return Placement(self._partitions[number], None if self._offsets is None else self._offsets[number])
