"""Checks the arguments of public methods before the methods run, by the annotations and by the names of the arguments.

`checked` decorates a class. An argument that its annotation does not allow raises `ValidationError`, which names the
argument. A new method or argument is checked without further code.
"""

from __future__ import annotations

import functools
import inspect
import operator
import threading
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import datetime, timedelta
from itertools import chain, repeat
from types import NoneType, UnionType
from typing import Any, Final, Literal, TypeAlias, TypeVar, Union, Unpack, get_args, get_origin

import sqlalchemy

from eventsql_orchestration.errors import InvalidNameError, ValidationError
from eventsql_orchestration.model import MAX_KEY_BYTES, MAX_PARTITIONS, NOT_PARTITIONED, Publication, check_topic_name
from eventsql_orchestration.validation import (
    MAX_BIGINT,
    MAX_INTEGER,
    Duration,
    check_kind,
    check_seconds,
    check_text,
    check_time,
    check_whole,
    shown,
)

Rule: TypeAlias = Callable[[Any], object]
"""Returns the argument for the method, or raises `ValidationError`."""

AnyClass = TypeVar("AnyClass", bound=type)
Function = TypeVar("Function", bound=Callable[..., Any])

WHOLE: Final[Mapping[str, tuple[int, int]]] = {
    **dict.fromkeys(("batch", "max_attempts", "max_events", "min_events"), (1, MAX_INTEGER)),
    **dict.fromkeys(("claim_id", "letter_id"), (1, MAX_BIGINT)),
    **dict.fromkeys(("consumed", "limit"), (0, MAX_BIGINT)),
    "max_overflow": (-1, 10_000),
    "partition": (NOT_PARTITIONED, MAX_PARTITIONS),
    "pool_size": (0, 10_000),
    "workers": (1, 10_000),
}
"""The bounds of arguments that are whole numbers, by name. Any other whole number is a bigint."""

POSITIVE: Final = frozenset({"every", "lease", "polling_delay", "seconds", "visibility_timeout"})
"""Durations that cannot be 0 seconds."""

MAX_MOMENT: Final = 1e12
"""The largest time of `time.monotonic` that is accepted, in seconds: 30,000 years."""

NAMES: Final = frozenset(
    {"aggregate_id", "aggregate_type", "consumer", "log", "name", "resource", "rollup", "schema", "timeline"}
)
"""Arguments that are names: a wrong name raises `InvalidNameError`."""


def checked(decorated: AnyClass) -> AnyClass:
    """Check the arguments of the constructor and of the public methods that a class defines, at each call."""
    for name, member in list(vars(decorated).items()):
        if inspect.isfunction(member) and (name == "__init__" or not name.startswith("_")):
            setattr(decorated, name, _checking(member))
    return decorated


_CHECK_THEMSELVES: Final[set[Callable[..., Any]]] = set()


def checks_itself(function: Function) -> Function:
    """Do not check a method of a `checked` class: it runs for each event, and checks its arguments in less time."""
    _CHECK_THEMSELVES.add(function)
    return function


def _checking(function: Callable[..., Any]) -> Callable[..., Any]:
    arguments = _Arguments(function)
    if function in _CHECK_THEMSELVES or not arguments.parameters:
        return function
    check = arguments.check
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def awaited(self: object, /, *given: Any, **named: Any) -> Any:
            return await function(self, *check(given, named), **named)

        return awaited

    @functools.wraps(function)
    def call(self: object, /, *given: Any, **named: Any) -> Any:
        return function(self, *check(given, named), **named)

    return call


class _Arguments:
    """The arguments of one method, without `self`, and their rules."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.parameters = list(inspect.signature(function).parameters.values())[1:]

    @functools.cached_property
    def _rules(self) -> tuple[dict[str, Rule], list[Rule], Rule]:
        """The rules by name, by position, and for further positional arguments. They are made at the first call.

        The fields of `**options: Unpack[…]` have rules by name too.
        """
        hints = typing.get_type_hints(self._function)
        named = [each for each in self.parameters if each.kind is not inspect.Parameter.VAR_KEYWORD]
        rules = {each.name: rule(each.name, hints.get(each.name, Any)) for each in named}
        for options in [hint for hint in hints.values() if get_origin(hint) is Unpack]:
            fields = typing.get_type_hints(get_args(options)[0])
            rules |= {name: rule(name, hint) for name, hint in fields.items()}
        by_kind = {
            kind: [rules[each.name] for each in self.parameters if each.kind is kind]
            for kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        }
        more = by_kind[inspect.Parameter.VAR_POSITIONAL]
        return rules, by_kind[inspect.Parameter.POSITIONAL_OR_KEYWORD], more[0] if more else _anything

    def check(self, given: tuple[Any, ...], named: dict[str, Any]) -> Iterable[Any]:
        """Check the arguments. Returns the arguments by position, and replaces the arguments by name in `named`."""
        by_name, in_order, more = self._rules
        for name, value in named.items():
            if name not in by_name:
                # A method that takes options as `**options` would ignore it.
                raise TypeError(f"{self._function.__qualname__}() got an unexpected keyword argument {name!r}")
            named[name] = by_name[name](value)
        return [check(value) for check, value in zip(chain(in_order, repeat(more)), given, strict=False)]


def _anything(value: object) -> object:
    return value


def rule(name: str, hint: Any) -> Rule:
    """The rule of an argument of this name and type."""
    if isinstance(hint, TypeVar):
        hint = hint.__bound__
    if hint == Duration:
        return _duration(name)
    kind, of = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        return _union(name, of)
    if (make := _RULES.get(kind)) is not None:
        return make(name, of)
    if not isinstance(kind, type) or kind is object:
        return _anything
    if of and issubclass(kind, Iterable) and not issubclass(kind, Mapping):
        return _items(name, kind, of[0])
    return _instance(name, kind)


def _whole(name: str) -> Rule:
    least, most = WHOLE.get(name, (-MAX_BIGINT - 1, MAX_BIGINT))
    return lambda value: check_whole(name, value, least=least, most=most)


def _text(name: str) -> Rule:
    if name == "topic":
        # An impossible topic name is not looked up: its table's name would be cut.
        return check_topic_name
    error = InvalidNameError if name in NAMES else ValidationError
    return lambda value: check_text(name, value, most=MAX_KEY_BYTES, error=error)


def _instance(name: str, kind: type | UnionType) -> Rule:
    def check(value: object) -> object:
        check_kind(name, value, kind)
        return value

    return check


def _only(name: str, fits: Callable[[Any], bool], wanted: str, *, by_value: bool = False) -> Rule:
    """Accept values that fit; the error for another value shows the value, or its type."""

    def check(value: object) -> object:
        if not fits(value):
            raise ValidationError(f"{name} must be {wanted}, not {shown(value) if by_value else type(value).__name__}")
        return value

    return check


def _class(name: str, of: Any) -> Rule:
    bound: Any = of.__bound__ if isinstance(of, TypeVar) else of
    wanted = f"a class derived from {bound.__name__}"
    return _only(name, lambda value: isinstance(value, type) and issubclass(value, bound), wanted, by_value=True)


def _event(name: str) -> Rule:
    # Events of multiprocessing are not a subclass.
    methods = ("is_set", "set", "wait")
    return _only(name, lambda value: all(callable(getattr(value, each, None)) for each in methods), "a threading.Event")


def _choice(name: str, choices: tuple[object, ...]) -> Rule:
    def fits(value: object) -> bool:
        return any(type(value) is type(each) and value == each for each in choices)

    return _only(name, fits, " or ".join(map(repr, choices)), by_value=True)


def _duration(name: str) -> Rule:
    def check(value: Any) -> object:
        if name == "deadline" and isinstance(value, int | float) and not isinstance(value, bool):
            # A moment of `time.monotonic`.
            if not -MAX_MOMENT <= value <= MAX_MOMENT:
                raise ValidationError(f"{name} must be a moment of time.monotonic, not {shown(value)}")
            return value
        return check_seconds(name, value, zero=name not in POSITIVE)

    return check


def _items(name: str, kind: type, of: Any) -> Rule:
    """Check the items of a collection now, and the items of any other iterable when the method reaches them."""
    if of is Publication:
        # A publisher checks publications itself.
        return _anything
    each = _row(f"an item of {name}", of)

    def check(value: object) -> object:
        if isinstance(value, str | bytes) or not isinstance(value, kind):
            raise ValidationError(f"{name} must be several values, as in a list, not {type(value).__name__}")
        items: Any = value
        return [each(item) for item in items] if isinstance(items, Collection) else map(each, items)

    return check


def _row(name: str, hint: Any) -> Rule:
    if get_origin(hint) is not tuple:
        return rule(name, hint)
    length = len(get_args(hint))
    return _only(
        name, lambda row: isinstance(row, list | tuple) and len(row) == length, f"a tuple of {length}", by_value=True
    )


def _union(name: str, options: tuple[Any, ...]) -> Rule:
    if sqlalchemy.Connection in options or any(get_origin(each) is Literal for each in options):
        # The database checks connections, and `starting_at` checks a start.
        return _anything
    others = [each for each in options if each is not NoneType]
    if {float, timedelta} <= set(others):
        # A `Duration` among others. The rule of `float` takes a timedelta too.
        others.remove(timedelta)
    if all(isinstance(each, type) and each not in (int, str, bytes, float, datetime) for each in others):
        check = _instance(name, functools.reduce(operator.or_, others)) if len(others) > 1 else rule(name, others[0])
    else:
        check = _first_of([rule(name, each) for each in others])
    return check if NoneType not in options else lambda value: None if value is None else check(value)


def _first_of(rules: list[Rule]) -> Rule:
    """Accept values that any of the rules accepts; raise the error of the first."""

    def check(value: object) -> object:
        for each in rules[1:]:
            try:
                return each(value)
            except ValidationError:
                continue
        return rules[0](value)

    return check


_RULES: Final[dict[Any, Callable[[str, tuple[Any, ...]], Rule]]] = {
    Callable: lambda name, _: _only(name, callable, "a function"),
    Literal: _choice,
    bytes: lambda name, _: _instance(name, bytes | bytearray | memoryview),
    datetime: lambda name, _: lambda value: check_time(name, value),
    float: lambda name, _: _duration(name),
    int: lambda name, _: _whole(name),
    str: lambda name, _: _text(name),
    threading.Event: lambda name, _: _event(name),
    type: lambda name, of: _class(name, of[0]),
}
"""The rules of types for which `isinstance` is not enough."""
