"""Commands made of functions, and the arguments and options that several commands take."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Final, TypeAlias, TypeVar, Unpack, get_args, get_origin, get_type_hints

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from eventsql_orchestration.cli.context import pass_context
from eventsql_orchestration.cli.offered_names import offered
from eventsql_orchestration.model import check_topic_name
from eventsql_orchestration.topics.positions import AtOffset, AtTime, Back, Earliest, Latest, Place
from eventsql_orchestration.validation import check_name, check_time, shown

T = TypeVar("T")

FILE: Final = click.Path(path_type=Path, dir_okay=False)

DIRECTORY: Final = click.Path(path_type=Path, file_okay=False, exists=True)


class Whole(click.IntRange):
    """A whole number within bounds, named as in a sentence: click calls it an integer range in its errors."""

    name = "whole number"


POSITIVE: Final = Whole(min=1)

PLACES: Final = (
    "earliest, latest, an offset, a time with its zone (2026-05-01T12:00:00Z), or a duration before now (15m, 2h, 7d)"
)
"""The places that `PLACE` reads, for people."""

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


class Text(click.ParamType[T]):
    """A text of which `read` makes a value, or raises `click.BadParameter` or `ValidationError`."""

    def __init__(self, name: str, read: Callable[[str], T]) -> None:
        self.name = name
        self._read = read

    def convert(self, value: Any, param: object, ctx: object) -> T:  # noqa: ARG002 - click's
        return self._read(value)


class Name(Text[str]):
    """A name. One that is against the rules is refused before a connection is made."""

    def shell_complete(
        self,
        ctx: click.Context,
        param: click.Parameter,  # noqa: ARG002 - click's
        incomplete: str,
    ) -> list[CompletionItem]:
        """The names of this kind in the database."""
        return offered(ctx, self.name, incomplete)


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


def _pair(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise click.BadParameter(f"{text!r} is not NAME=VALUE")
    return name, value


def _one_value_each(_: object, __: object, pairs: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """Refuse pairs that give one name two values: all but the last would be ignored."""
    values: dict[str, str] = {}
    for name, value in pairs:
        if values.setdefault(name, value) != value:
            raise click.BadParameter(f"{name!r} has two values: {values[name]!r} and {value!r}")
    return pairs


def _time(text: str) -> datetime:
    """A time of ISO 8601 with its zone. Without a zone, its meaning would depend on the machine."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        duration = "; --by-duration takes a duration" if _LIKE_A_DURATION.fullmatch(text) else ""
        raise click.BadParameter(f"{text!r} is not a time such as 2026-05-01T12:00:00Z{duration}") from None
    if time.tzinfo is None:
        raise click.BadParameter(f"{text!r} has no time zone: say 2026-05-01T12:00:00Z for UTC, or …+02:00")
    return check_time("the time", time)


_LIKE_A_DURATION: Final = re.compile(r"(\d+(\.\d+)?[wdhms])+|P.+", re.ASCII)
_NUMBER: Final = r"(\d+(?:\.\d+)?)"
_SHORT: Final = "".join(f"(?:{_NUMBER}{unit})?" for unit in "wdhms")
_ISO: Final = f"P(?:{_NUMBER}W)?(?:{_NUMBER}D)?(?:T(?=\\d)(?:{_NUMBER}H)?(?:{_NUMBER}M)?(?:{_NUMBER}S)?)?"


def _duration(text: str) -> timedelta:
    """`15m`, `1h30m`, `7d`, or in ISO 8601 `PT15M`. Months and years are refused, because their lengths differ."""
    match = re.fullmatch(_SHORT, text, re.ASCII) or re.fullmatch(_ISO, text, re.ASCII)
    if match is None or not any(match.groups()):
        raise click.BadParameter(f"{text!r} is not a duration such as 30s, 15m, 2h, 7d or PT1H30M")
    weeks, days, hours, minutes, seconds = (float(number or 0) for number in match.groups())
    try:
        return timedelta(weeks=weeks, days=days, hours=hours, minutes=minutes, seconds=seconds)
    except OverflowError:
        raise click.BadParameter(f"{text!r} is too long a duration") from None


def _moment(text: str) -> datetime:
    if _LIKE_A_DURATION.fullmatch(text):
        try:
            return datetime.now(UTC) - _duration(text)
        except OverflowError:
            raise click.BadParameter(f"{text!r} before now is before the year 1") from None
    if not text[:1].isdecimal():
        raise click.BadParameter(f"{text!r} is not a time such as 2026-05-01T12:00:00Z, nor a duration such as 2h")
    return _time(text)


def _place(text: str) -> Place:
    if text in ("earliest", "latest"):
        return Earliest() if text == "earliest" else Latest()
    if re.fullmatch(r"-?[0-9]+", text):
        try:
            offset = int(text)
        except ValueError:
            # Python reads no more than some thousand digits.
            raise click.BadParameter(f"{shown(text)} is too large for an offset") from None
        return AtOffset(offset)
    if _LIKE_A_DURATION.fullmatch(text):
        return Back(_duration(text))
    if not text[:1].isdecimal():
        raise click.BadParameter(f"{text!r} is neither earliest, latest, an offset, a time nor a duration")
    return AtTime(_time(text))


class Seconds(Number):
    """A number of seconds within bounds, or a duration: `90`, `90s`, `1m30s`."""

    name = "number of seconds or duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, str) and _LIKE_A_DURATION.fullmatch(value):
            value = DURATION.convert(value, param, ctx).total_seconds()
        return super().convert(value, param, ctx)


def _pattern(text: str) -> re.Pattern[bytes]:
    try:
        return re.compile(text.encode())
    except (re.error, UnicodeEncodeError) as error:
        raise click.BadParameter(f"{shown(text)} is not a regular expression: {error}") from None


_UNITS: Final = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip


def _size(text: str) -> int:
    match = re.fullmatch(rf"{_NUMBER} ?([a-z]*)", text.lower(), re.ASCII)
    if match is None or match[2] not in _UNITS:
        raise click.BadParameter(f"{text!r} is not a size such as 10GiB, 500MB or 4096")
    return int(Decimal(match[1]) * _UNITS[match[2]])


TIME: Final = Text("time", _time)
DURATION: Final = Text("duration", _duration)
MOMENT: Final = Text("time", _moment)
"""A time with its zone, or a duration before now."""
PLACE: Final = Text("place", _place)
"""A place in a topic's log: `earliest`, `latest`, an offset, a time, or a duration before now."""
PATTERN: Final = Text("regex", _pattern)
SIZE: Final = Text("size", _size)
"""A number of bytes: `10GiB`, `500MB`, `4096`."""

_USUAL: Final[dict[Any, dict[str, Any]]] = {
    int: {"type": int, "metavar": "N"},
    datetime: {"type": TIME},
    timedelta: {"type": DURATION},
    AtOffset: {"type": PLACE},
    tuple[str, str]: {"type": Text("name=value", _pair), "callback": _one_value_each},
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
MaxEvents: TypeAlias = Annotated[int | None, option("End after N events.", "--limit", type=POSITIVE)]
Follow: TypeAlias = Annotated[bool, option("Go on with new events, until Ctrl-C.")]
Partition: TypeAlias = Annotated[int | None, option("Only this partition.")]
