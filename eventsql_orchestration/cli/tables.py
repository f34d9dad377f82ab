"""Tables and fields for people, of the columns of objects."""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from eventsql_orchestration.cli import lazy
from eventsql_orchestration.cli.output import json_text, one_line, stdout_is_terminal, write, write_json
from eventsql_orchestration.model import NOT_PARTITIONED

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment
    from rich.table import Table

Column: TypeAlias = str | Callable[[Any], object]
"""The name of an attribute or a key, or a function of the object."""

Columns: TypeAlias = Mapping[str, Column]
"""The columns of a table, or the fields of a JSON object, by their names."""

_UNBOUNDED: Final = 100_000
"""Width of a pipe or a file: a row there is one line of any length."""

_GAP: Final = 2
"""The space between two columns."""

_FOLDED: Final = 8
"""The narrowest column into which a text is folded."""

_SENTENCE: Final = 24
"""The narrowest column in which a text of several words is easy to read."""


def same(*names: str) -> dict[str, Column]:
    """Columns that have the names of their attributes."""
    return {name: name for name in names}


def without(item: Any, *names: str) -> dict[str, Any]:
    """The fields of an object of a data class, except those of `names`."""
    return {name: value for name, value in asdict(item).items() if name not in names}


def picked(item: object, columns: Columns) -> dict[str, Any]:
    """The columns of an object, or of a mapping, by their names. A key that the mapping lacks is None."""
    get = item.get if isinstance(item, Mapping) else partial(getattr, item)
    return {name: get(each) if isinstance(each, str) else each(item) for name, each in columns.items()}


def table_of(
    items: Sequence[Any], columns: Columns, *, right: Collection[str] = (), spare: Sequence[str] = ()
) -> Listing:
    """A table for people with a row for each object. A column `shard` without values is left out.

    Numbers and the columns of `right` are right-aligned, with groups of digits. None is a dash. A terminal in which
    names would be folded leaves out the columns of `spare`, one after the other, until names fit.
    """
    rows = [picked(item, columns) for item in items]
    shown = [name for name in columns if name != "shard" or any(row[name] is not None for row in rows)]
    drawn = lazy.Table(box=None, pad_edge=False, header_style="bold")
    least = wanted = -_GAP
    for name in shown:
        cells = [row[name] for row in rows]
        numeric = bool(cells) and all(isinstance(cell, int | float | None) for cell in cells)
        # A narrow terminal folds texts. Numbers stay whole: a number that is cut short is another number.
        whole = not any(isinstance(cell, str) for cell in cells)
        justify: Literal["right", "left"] = "right" if numeric or name in right else "left"
        natural = max(len(text) for text in (name, *map(cell, cells)))
        least += (natural if whole else min(natural, _FOLDED)) + _GAP
        words = not whole and any(" " in str(each) for each in cells)
        wanted += (min(natural, _SENTENCE) if words else natural) + _GAP
        drawn.add_column(name, justify=justify, no_wrap=whole, overflow="fold")
    for row in rows:
        drawn.add_row(*(lazy.Text(cell(row[name])) for name in shown))
    fewer = {name: column for name, column in columns.items() if name not in spare[:1]}
    narrow = partial(table_of, items, fewer, right=right, spare=spare[1:]) if spare else None
    return Listing(drawn, least, wanted, narrow)


class Listing:
    """A table that is at least as wide as its numbers and the words of its texts need.

    In a terminal that is narrower, the terminal breaks its lines. A refreshing screen shows the left part. In a
    terminal that is narrower than `wanted`, it is the table that `narrow` makes, unless that is None.
    """

    def __init__(self, drawn: Table, least: int, wanted: int, narrow: Callable[[], Listing] | None) -> None:
        self._drawn = drawn
        self._least = least
        self._wanted = wanted
        self._narrow = narrow

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        if self._narrow is not None and options.max_width < self._wanted:
            yield from self._narrow().__rich_console__(console, options)
            return
        yield from console.render(self._drawn, options.update_width(max(options.max_width, self._least)))


def cell(value: object) -> str:
    """A value as one line of text, for people."""
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case float():
            return f"{value:,.1f}"
        case datetime():
            # In this machine's time zone, in the form that options take.
            return value.astimezone().isoformat(" ", "seconds")
        case _:
            return one_line(json_text(value) if isinstance(value, dict) else str(value))


def show(renderable: RenderableType) -> None:
    """Write an object of rich to standard output."""
    terminal = stdout_is_terminal()
    console = lazy.Console(
        file=io.StringIO() if not terminal else None, width=None if terminal else _UNBOUNDED, highlight=False
    )
    with console.capture() as capture:
        # Uncropped: see `Listing`.
        console.print(renderable, crop=False)
    lines = capture.get().splitlines()
    write("".join(f"{line if terminal else line.rstrip()}\n" for line in lines))


def show_items(
    items: Sequence[Any], columns: Columns, *, right: Collection[str] = (), spare: Sequence[str] = ()
) -> None:
    show(table_of(items, columns, right=right, spare=spare))


def show_list(
    items: Sequence[Any], columns: Columns, *, as_json: bool, json: Callable[[Any], object] = asdict,
    spare: Sequence[str] = (),
) -> None:  # fmt: skip
    """Write objects as a table or, with `as_json`, as a JSON list of what `json` makes of each."""
    if as_json:
        write_json([json(item) for item in items])
    else:
        show_items(items, columns, spare=spare)


def show_fields(fields: Mapping[str, object]) -> None:
    """Write names with their values, one to a line."""
    grid = lazy.Table.grid(padding=(0, 2))
    for name, value in fields.items():
        grid.add_row(lazy.Text(cell(name), style="bold"), lazy.Text(cell(value)))
    show(grid)


def partition_of(item: Any) -> str:
    """The partition of an object, for people."""
    return partition_name(item.partition)


def partition_name(partition: int) -> str:
    """A partition for people. Without partitioning, it has no number."""
    return "all" if partition == NOT_PARTITIONED else str(partition)
