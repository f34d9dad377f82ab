"""The description of a benchmark: its sizes, which are its options on the command line, and how it runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import Field, asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final, Self

from eventsql_orchestration.bench.figure import Figure
from eventsql_orchestration.bench.processes import Report
from eventsql_orchestration.bench.session import Session
from eventsql_orchestration.client.eventsql import EventSQL
from eventsql_orchestration.errors import BenchmarkError
from eventsql_orchestration.model import BLOCKS, MAX_PARTITIONS, STORAGES

OPTION: Final = "option"
"""The key of an `Option` in the metadata of a field."""

UNBOUNDED: Final = 1e9
"""Larger than any number that a benchmark could take."""


@dataclass(frozen=True, slots=True)
class Option:
    """How the command line shows a size of a benchmark.

    Numbers are between `least` and `most`. `kind` is the type of the value. A value on the command line is multiplied
    by `scale`. `flag` is the name of the option if it differs from the field's name. An option of a bool takes no value
    and reverses its default. `quick` is the value of a quick run.
    """

    help: str
    kind: type
    least: float = 1
    most: float = UNBOUNDED
    metavar: str = "N"
    flag: str | None = None
    scale: float = 1
    choices: tuple[str, ...] = ()
    quick: Any = None


def option(default: Any, help: str = "", *, kind: type | None = None, **shown: Any) -> Any:  # noqa: A002 - click's name
    """A field of a benchmark, shown as the fields of `Option` say. A field without `help` is no option."""
    return field(default=default, metadata={OPTION: Option(help, kind or type(default), **shown)})


duration = partial(option, kind=float, least=0.1, most=86_400, metavar="SECONDS")
"""A field for a duration in seconds: a tenth of a second to a day."""

workers = partial(option, most=64)
"""A field for a number of processes, threads or connections."""


@dataclass(frozen=True, slots=True)
class Site:
    """The surroundings of a benchmark: the platform, the directory for files, and the receiver of progress."""

    open_platform: Callable[[], EventSQL]
    home: Path
    report: Report

    def session(self, platform: EventSQL, raw_events: int) -> Session:
        return Session(platform, raw_events=raw_events, report=self.report, home=self.home)


@dataclass(frozen=True, kw_only=True)
class Benchmark(ABC):
    """A benchmark of certain sizes. The docstring of a subclass is the help of its command."""

    name: ClassVar[str]
    summary: ClassVar[str]
    hidden: ClassVar[frozenset[str]] = frozenset()
    """Fields that mean nothing to this benchmark: they are no options."""

    partitions: int = option(10, "Partitions of the topic", most=MAX_PARTITIONS)
    storage: str = option(BLOCKS, "Form of the topic's log", choices=STORAGES)
    raw_events: int = option(1_000_000, "Events of each measurement of the raw COPY rate", quick=20_000)

    @classmethod
    def options(cls) -> Iterator[tuple[Field[Any], Option]]:
        """The fields that are options, the subclass's own fields first."""
        named = [(each, each.metadata[OPTION]) for each in fields(cls)]
        shown = [(each, option) for each, option in named if option.help and each.name not in cls.hidden]
        inherited = {each.name for each in fields(Benchmark)}
        return iter(sorted(shown, key=lambda pair: pair[0].name in inherited))

    @classmethod
    def sized(cls, *, quick: bool = False, **given: Any) -> Self:
        """The benchmark with the given values, and its own values for the other fields. Raises `ValidationError`."""
        small = {each.name: each.metadata[OPTION].quick for each in fields(cls)} if quick else {}
        return cls(**{name: value for name, value in small.items() if value is not None} | given)

    @property
    def stored_events(self) -> int:
        """The number of events that the benchmark stores for a while."""
        return 0

    @property
    def remark(self) -> str:
        """A remark for the reader of the figures, or nothing."""
        return ""

    def run(self, site: Site) -> tuple[list[Figure], dict[str, Any]]:
        """Measure. Gives the figures, and the machine with the sizes. Raises `BenchmarkError` and database errors."""
        with site.open_platform() as platform:
            if len(platform.shards) > 1:
                raise BenchmarkError(
                    "a benchmark measures one database: choose it with --shard NAME on the command line"
                )
            with site.session(platform, self.raw_events) as session:
                figures = [*self.measure(session), *session.raw_copy()]
                return figures, {**session.describe(), "benchmark": asdict(self)}

    @abstractmethod
    def measure(self, session: Session) -> list[Figure]:
        """Measure on a session's platform. Raises `BenchmarkError`."""
