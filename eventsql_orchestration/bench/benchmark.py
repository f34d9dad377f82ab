"""The description of a benchmark: its sizes, which are its options on the command line, and how it runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import Field, asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final, Self, TypeAlias

from eventsql_orchestration.bench.figure import Figure
from eventsql_orchestration.bench.processes import Report
from eventsql_orchestration.bench.session import Session
from eventsql_orchestration.client.eventsql import EventSQL
from eventsql_orchestration.errors import BenchmarkError, ValidationError
from eventsql_orchestration.model import BLOCKS, MAX_PARTITIONS, STORAGES

OPTION: Final = "option"
"""The key of an `Option` in the metadata of a field."""

UNBOUNDED: Final = 1e9
"""Larger than any number that a benchmark could take."""


@dataclass(frozen=True, slots=True)
class Option:
    """How the command line shows a size of a benchmark.

    Numbers are between `least` and `most`. `kind` is the type of the value. `flag` is the name of the option if it
    differs from the field's name. An option of a bool takes no value and reverses its default. `quick` is the value of
    a quick run.
    """

    help: str
    kind: type
    least: float = 1
    most: float = UNBOUNDED
    metavar: str = "N"
    flag: str | None = None
    choices: tuple[str, ...] = ()
    quick: Any = None


def option(default: Any, help: str = "", *, kind: type | None = None, **shown: Any) -> Any:  # noqa: A002 - click's name
    """A field of a benchmark, shown as the fields of `Option` say. A field without `help` is not an option."""
    return field(default=default, metadata={OPTION: Option(help, kind or type(default), **shown)})


duration = partial(option, kind=float, least=0.1, most=86_400, metavar="SECONDS")
"""A field for a duration in seconds: a tenth of a second to a day."""

workers = partial(option, most=64)
"""A field for a number of processes, threads or connections."""

connected = partial(option, most=30)
"""A field for a number of threads with a connection each: a platform gives a process 30 at once."""


def check_share(work: int, works: str, sharers: int, name: str) -> None:
    """Raise `ValidationError` unless each of `sharers` publishers or connections gets a part of the work."""
    if work < sharers:
        raise ValidationError(f"{work} {works} are too few for {sharers} {name}")


Open: TypeAlias = Callable[[], EventSQL]
"""Opens the platform that is measured."""


@dataclass(frozen=True, kw_only=True)
class Benchmark(ABC):
    """A benchmark of certain sizes. The docstring of a subclass is the help of its command."""

    name: ClassVar[str]
    summary: ClassVar[str]

    @classmethod
    def options(cls) -> list[tuple[Field[Any], Option]]:
        """The fields that are options, the subclass's own fields first."""
        shown = [(each, each.metadata[OPTION]) for each in fields(cls) if each.metadata[OPTION].help]
        return sorted(shown, key=lambda pair: pair[0].name not in cls.__annotations__)

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

    def run(self, open_platform: Open, *, home: Path, report: Report) -> tuple[list[Figure], dict[str, Any]]:
        """Measure. Gives the figures, and the machine with the sizes. Raises `BenchmarkError` and database errors.

        `home` is the directory for files.
        """
        with open_platform() as platform:
            if len(platform.shards) > 1:
                raise BenchmarkError(
                    "a benchmark measures one database: choose it with --shard NAME on the command line"
                )
            with Session(platform, home=home, report=report) as session:
                figures = [*self.measure(session), *session.raw_copy()]
                return figures, {**session.describe(), "benchmark": asdict(self)}

    @abstractmethod
    def measure(self, session: Session) -> list[Figure]:
        """Measure on a session's platform. Raises `BenchmarkError`."""


@dataclass(frozen=True, kw_only=True)
class OnTopic(Benchmark):
    """A benchmark on a topic of its own."""

    partitions: int = option(10, "Partitions of the topic", most=MAX_PARTITIONS)
    storage: str = option(BLOCKS, "Form of the topic's log", choices=STORAGES)

    def topic(self, session: Session, **options: str) -> AbstractContextManager[str]:
        return session.topic(self.name, partitions=self.partitions, storage=self.storage, **options)


@dataclass(frozen=True, kw_only=True)
class BesideRawCopy(Benchmark):
    """A benchmark whose rates stand beside the raw COPY rate."""

    raw_events: int = option(1_000_000, "Events of each measurement of the raw COPY rate", quick=20_000)

    def beside_raw_copy(self, session: Session, measure: Callable[[], list[Figure]]) -> list[Figure]:
        return session.beside_raw_copy(measure, events=self.raw_events)
