"""Plots of rollups as pictures, drawn by Matplotlib without a display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Final

from eventsql_orchestration.errors import MissingExtraError, ValidationError
from eventsql_orchestration.views.rollups import RollupBucket

try:
    from matplotlib import rc_context
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ModuleNotFoundError:
    raise MissingExtraError("plots", "a plot") from None

FORMS: Final = (".png", ".svg", ".pdf")
"""The endings of files that can be drawn."""

MOST_LINES: Final = 20
"""The most lines of a plot: nobody could tell more lines apart."""

_WIDTH: Final = 10.0
_HEIGHT: Final = 3.0
"""Width of a plot and height of each of its parts, in inches."""


def plot_rollup(buckets: Sequence[RollupBucket], path: Path, *, title: str) -> None:
    """Draw the buckets that `RollupView.read` gave to a file: the counts, and below them the sum of each value.

    Each combination of dimensions is a line. The ending of the file's name, one of `FORMS`, says its form. Raises
    `ValidationError` for another ending, for no buckets and for more than 20 lines, and `OSError` for a file that
    cannot be written.
    """
    if path.suffix.lower() not in FORMS:
        raise ValidationError(f"a plot cannot be drawn to {path.name!r}: end its name in one of {', '.join(FORMS)}")
    if not buckets:
        raise ValidationError("there are no buckets to draw: choose another time, or other values of dimensions")
    lines = _lines(buckets)
    if len(lines) > MOST_LINES:
        raise ValidationError(
            f"the plot would have {len(lines)} lines, and {MOST_LINES} are allowed: group by fewer dimensions"
        )
    # Texts of an SVG stay texts, which can be searched and selected.
    with rc_context({"svg.fonttype": "none"}):
        _drawn(lines, list(buckets[0].values), title).savefig(path)


def _lines(buckets: Sequence[RollupBucket]) -> Mapping[str, list[RollupBucket]]:
    """The buckets of each combination of dimensions, by its name."""
    lines: dict[str, list[RollupBucket]] = {}
    for bucket in buckets:
        lines.setdefault(" · ".join(bucket.dimensions.values()), []).append(bucket)
    return lines


def _drawn(lines: Mapping[str, list[RollupBucket]], values: Sequence[str], title: str) -> Figure:
    figure = Figure(figsize=(_WIDTH, _HEIGHT * (1 + len(values))), layout="constrained")
    parts = figure.subplots(1 + len(values), sharex=True, squeeze=False)[:, 0]
    for name, buckets in lines.items():
        times = [bucket.bucket for bucket in buckets]
        _add(parts[0], times, [bucket.count for bucket in buckets], name)
        for part, value in zip(parts[1:], values, strict=True):
            _add(part, times, [float(bucket.values[value].sum) for bucket in buckets], name)
    for part, label in zip(parts, ["count", *(f"sum of {value}" for value in values)], strict=True):
        part.set_ylabel(label)
        part.grid(visible=True, alpha=0.3)
    # Dollar signs would begin formulas.
    parts[0].set_title(title.replace("$", r"\$"))
    if any(lines):
        parts[0].legend(loc="upper left", fontsize="small")
    figure.autofmt_xdate()
    return figure


def _add(part: Axes, times: Sequence[datetime], numbers: Sequence[float], name: str) -> None:
    # A line that begins with an underscore is left out of legends.
    label = name.replace("$", r"\$")
    part.plot(times, numbers, marker=".", label=f" {label}" if label.startswith("_") else label)  # type: ignore[arg-type]  # dates are drawn
