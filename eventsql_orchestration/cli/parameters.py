"""Commands made of functions, and the arguments and options that several commands take."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Final, TypeAlias, Unpack, get_args, get_origin, get_type_hints

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from eventsql_orchestration.cli.context import pass_context
from eventsql_orchestration.cli.offered_names import offered
from eventsql_orchestration.model import check_topic_name
from eventsql_orchestration.topics.positions import AtOffset, AtTime, Back, Earliest, Latest, Place
from eventsql_orchestration.validation import check_name, check_time, shown

FILE: Final = click.Path(path_type=Path, dir_okay=False)

DIRECTORY: Final = click.Path(path_type=Path, file_okay=False, exists=True)


class Whole(click.IntRange):
    """A whole number within bounds, named as in a sentence: click calls it an integer range in its errors."""

    name = "whole number"


POSITIVE: Final = Whole(min=1)

PLACES: Final = (
    "earliest, latest, an offset, a time with its zone (2026-05-01T12:00:00Z), or a duration before now (15m, 2h, 7d)"
)
"""The places that `LogPlace` reads, for people."""

Parameter: TypeAlias = Callable[[str, Any], click.Parameter]
"""Makes an argument or option of the name and the type of a function's parameter."""


def command(
    group: click.Group | None = None, name: str | None = None, **settings: Any
) -> Callable[[Callable[..., None]], click.Command]:
    """Make a command of a function that takes the context first, and add the command to `group`.

    Each other parameter is annotated as `Annotated[type, option(…)]` or `Annotated[type, argument(…)]`. With
    `Unpack[options]`, the fields of the TypedDict `options` are further parameters. `settings` are click's.
    """

    def make(function: Callable[..., None]) -> click.Command:
        chosen = {"params": list(_parameters(function)), "short_help": _first_sentence(function), **settings}
        return (click if group is None else group).command(name, **chosen)(pass_context(function))

    return make


def _first_sentence(function: Callable[..., None]) -> str:
    """A command's line in the list of its group. Click would cut it at the end of the line."""
    text = " ".join((function.__doc__ or "").split("\n\n")[0].split())
    return text.partition(". ")[0].rstrip(".") + "."


def _parameters(annotated: object) -> Iterator[click.Parameter]:
    hints = get_type_hints(annotated, include_extras=True)
    # The help shows the fields of a TypedDict first.
    for name, hint in sorted(hints.items(), key=lambda item: get_origin(item[1]) is not Unpack):
        if get_origin(hint) is Unpack:
            yield from _parameters(get_args(hint)[0])
        elif get_origin(hint) is Annotated:
            kind, parameter = get_args(hint)
            yield parameter(name, kind)


def argument(**settings: Any) -> Parameter:
    """An argument, which may be left out if its type allows None. `settings` are click's."""
    return lambda name, kind: click.Argument([name], **{"required": NoneType not in get_args(kind), **settings})


class Name(click.ParamType[str]):
    """A name that `check` accepts. Any other name is refused before a connection is made."""

    def __init__(self, name: str, check: Callable[[str], str]) -> None:
        self.name = name
        self._check = check

    def shell_complete(
        self,
        ctx: click.Context,
        param: click.Parameter,  # noqa: ARG002 - click's
        incomplete: str,
    ) -> list[CompletionItem]:
        """The names of this kind in the database."""
        return offered(ctx, self.name, incomplete)

    def convert(self, value: Any, param: object, ctx: object) -> str:  # noqa: ARG002 - click's
        return self._check(value)


class Number(click.FloatRange):
    """A number within bounds, a billion at most. It refuses infinity, and "nan", which passes any bound."""

    name = "number"

    def __init__(self, least: float, most: float = 1e9, *, min_open: bool = False) -> None:
        super().__init__(least, most, min_open=min_open)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if number != number:  # noqa: PLR0124 - NaN
            self.fail(f"{value!r} is not a number", param, ctx)
        return number


class NameValue(click.ParamType[tuple[str, str]]):
    """`NAME=VALUE`."""

    name = "name=value"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        name, separator, text = str(value).partition("=")
        if not separator or not name:
            self.fail(f"{value!r} is not NAME=VALUE", param, ctx)
        return name, text


class Time(click.ParamType[datetime]):
    """A time of ISO 8601 with its zone. Without a zone, its meaning would depend on the machine."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        try:
            time = datetime.fromisoformat(value)
        except ValueError:
            self.fail(f"{value!r} is not a time such as 2026-05-01T12:00:00Z", param, ctx)
        if time.tzinfo is None:
            self.fail(f"{value!r} has no time zone: say 2026-05-01T12:00:00Z for UTC, or …+02:00", param, ctx)
        return check_time("the time", time)


_LIKE_A_DURATION: Final = re.compile(r"(\d+(\.\d+)?[wdhms])+|P.+", re.ASCII)
_NUMBER: Final = r"(\d+(?:\.\d+)?)"
_SHORT: Final = "".join(f"(?:{_NUMBER}{unit})?" for unit in "wdhms")
_ISO: Final = f"P(?:{_NUMBER}W)?(?:{_NUMBER}D)?(?:T(?=\\d)(?:{_NUMBER}H)?(?:{_NUMBER}M)?(?:{_NUMBER}S)?)?"


class Duration(click.ParamType[timedelta]):
    """`15m`, `1h30m`, `7d`, or in ISO 8601 `PT15M`. Months and years are refused, because their lengths differ."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> timedelta:
        text = str(value)
        match = re.fullmatch(_SHORT, text, re.ASCII) or re.fullmatch(_ISO, text, re.ASCII)
        if match is None or not any(match.groups()):
            self.fail(f"{value!r} is not a duration such as 30s, 15m, 2h, 7d or PT1H30M", param, ctx)
        weeks, days, hours, minutes, seconds = (float(number or 0) for number in match.groups())
        try:
            return timedelta(weeks=weeks, days=days, hours=hours, minutes=minutes, seconds=seconds)
        except OverflowError:
            self.fail(f"{value!r} is too long a duration", param, ctx)


class Seconds(Number):
    """A number of seconds within bounds, or a duration: `90`, `90s`, `1m30s`."""

    name = "number of seconds or duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, str) and _LIKE_A_DURATION.fullmatch(value):
            value = Duration().convert(value, param, ctx).total_seconds()
        return super().convert(value, param, ctx)


class Moment(click.ParamType[datetime]):
    """A time with its zone, or a duration before now."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        if isinstance(value, str) and _LIKE_A_DURATION.fullmatch(value):
            return datetime.now(UTC) - Duration().convert(value, param, ctx)
        return Time().convert(value, param, ctx)


class LogPlace(click.ParamType[Place]):
    """A place in a topic's log: `earliest`, `latest`, an offset, a time, or a duration before now."""

    name = "place"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Place:
        text = str(value)
        if text in ("earliest", "latest"):
            return Earliest() if text == "earliest" else Latest()
        if re.fullmatch(r"-?[0-9]+", text):
            try:
                offset = int(text)
            except ValueError:
                # Python reads no more than some thousand digits.
                self.fail(f"{shown(text)} is too large for an offset", param, ctx)
            return AtOffset(offset)
        if _LIKE_A_DURATION.fullmatch(text):
            return Back(Duration().convert(text, param, ctx))
        if not text[:1].isdecimal():
            self.fail(f"{value!r} is neither earliest, latest, an offset, a time nor a duration", param, ctx)
        return AtTime(Time().convert(text, param, ctx))


class Pattern(click.ParamType[re.Pattern[bytes]]):
    """A regular expression of Python, for values."""

    name = "regex"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> re.Pattern[bytes]:
        try:
            return re.compile(str(value).encode())
        except (re.error, UnicodeEncodeError) as error:
            self.fail(f"{shown(value)} is not a regular expression: {error}", param, ctx)


class Size(click.ParamType[int]):
    """A number of bytes: `10GiB`, `500MB`, `4096`."""

    name = "size"

    _UNITS: Final = {
        "": 1, "b": 1,
        "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
        "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
    }  # fmt: skip

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = re.fullmatch(rf"{_NUMBER} ?([a-z]*)", str(value).lower(), re.ASCII)
        if match is None or match[2] not in self._UNITS:
            self.fail(f"{value!r} is not a size such as 10GiB, 500MB or 4096", param, ctx)
        return int(Decimal(match[1]) * self._UNITS[match[2]])


_USUAL: Final[dict[Any, dict[str, Any]]] = {
    int: {"type": int, "metavar": "N"},
    datetime: {"type": Time()},
    timedelta: {"type": Duration()},
    AtOffset: {"type": LogPlace()},
    tuple[str, str]: {"type": NameValue()},
}
"""Settings of options by the type of the value, or a part of it."""


def option(help: str, *flags: str, **settings: Any) -> Parameter:  # noqa: A002 - click's name for it
    """An option. Without `flags`, its flag is the parameter's name; `settings` are click's.

    A bool is a flag without a value, a tuple an option that may be repeated. Numbers, times, durations, places and
    pairs of texts are read as such. The help shows a default.
    """

    def make(name: str, kind: Any) -> click.Option:
        chosen: dict[str, Any] = {"show_default": settings.get("default") is not None}
        if get_origin(kind) is tuple:
            chosen["multiple"], kind = True, get_args(kind)[0]
        if kind is bool:
            chosen["is_flag"] = True
        for read, usual in _USUAL.items():
            if kind == read or read in get_args(kind):
                chosen |= usual
        return click.Option([*(flags or [f"--{name.replace('_', '-')}"]), name], help=help, **{**chosen, **settings})

    return make


def executing(does: str) -> Parameter:
    """The option that makes a command do what it otherwise only plans."""
    return option(f"{does}. Without this option, the command only shows what it would do.")


def leave_out(why: str, *names: str) -> None:
    """Raise `click.UsageError` if the command line has one of these parameters, which would do nothing."""
    context = click.get_current_context()
    for each in context.command.params:
        if each.name in names and context.get_parameter_source(each.name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{each.opts[0]} {why}: leave it out")


CONSUMER: Final = Name("consumer", partial(check_name, "consumer name"))

_TOPIC: Final = Name("topic", check_topic_name)
TopicName: TypeAlias = Annotated[str, argument(type=_TOPIC)]
OptionalTopicName: TypeAlias = Annotated[str | None, argument(type=_TOPIC)]
TopicNames: TypeAlias = Annotated[
    tuple[str, ...], argument(type=_TOPIC, nargs=-1, metavar="[TOPIC]...", required=False)
]
ConsumerName: TypeAlias = Annotated[str, argument(type=CONSUMER)]
AsJson: TypeAlias = Annotated[bool, option("Print JSON.", "--json")]
MaxEvents: TypeAlias = Annotated[int | None, option("End after N events.", "--max", type=POSITIVE)]
Follow: TypeAlias = Annotated[bool, option("Go on with new events, until Ctrl-C.")]
Partition: TypeAlias = Annotated[int | None, option("Only this partition.")]
