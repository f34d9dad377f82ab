"""The public face of the package, found by inspection: the methods, with right and wrong arguments for each."""

from __future__ import annotations

import collections.abc
import importlib
import inspect
import random
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Literal, TypeAlias, TypeVar, Union, get_args, get_origin
from uuid import UUID

import psycopg
from psycopg import sql

from eventsql_orchestration.errors import EventSQLError

PACKAGE = "eventsql_orchestration"

ROOMS = (PACKAGE, f"{PACKAGE}.queue", f"{PACKAGE}.store", f"{PACKAGE}.views", f"{PACKAGE}.capture")
"""The modules whose `__all__` users import from."""

Function: TypeAlias = Callable[..., Any]


def exported() -> dict[str, type]:
    """The classes that users import, by name."""
    found: dict[str, type] = {}
    for room in ROOMS:
        module = importlib.import_module(room)
        found |= {name: each for name in module.__all__ if isinstance(each := getattr(module, name), type)}
    return found


def is_service(value: object) -> bool:
    """Whether a value is an object of the package with methods, and no value of its model."""
    kind = type(value)
    return kind.__module__.startswith(PACKAGE) and not is_dataclass(kind) and not issubclass(kind, Enum)


def _shown_as(owner: object, name: str) -> object:
    """An attribute or property of an object; None if the object has none, as a platform over several shards."""
    try:
        value = getattr(owner, name)
    except EventSQLError:
        return None
    return None if inspect.ismethod(value) else value


def reachable(root: object) -> dict[str, object]:
    """The objects with methods that an object shows under public names, and what those show, by their path."""
    found: dict[str, object] = {}
    left = [("", root)]
    while left:
        path, owner = left.pop()
        for name in dir(owner):
            value = None if name.startswith("_") else _shown_as(owner, name)
            if is_service(value) and all(value is not known for known in found.values()):
                found[f"{path}{name}"] = value
                left.append((f"{path}{name}.", value))
    return found


@dataclass(frozen=True)
class Argument:
    name: str
    hint: Any
    kind: Any
    required: bool


@dataclass(frozen=True)
class Method:
    """A public method of a class, or its constructor where the name is that of the class."""

    owner: type
    name: str
    arguments: tuple[Argument, ...]

    def __str__(self) -> str:
        return f"{self.owner.__name__}.{self.name}"


def arguments(function: Function, *, skip: int) -> tuple[Argument, ...]:
    hints = typing.get_type_hints(function)
    found: list[Argument] = []
    for each in list(inspect.signature(function).parameters.values())[skip:]:
        hint = hints.get(each.name, Any)
        if isinstance(hint, TypeVar):
            hint = hint.__bound__ or Any
        if each.kind is inspect.Parameter.VAR_KEYWORD:
            options = get_args(hint)
            if options and typing.is_typeddict(options[0]):
                fields = typing.get_type_hints(options[0]).items()
                found += [Argument(name, field, inspect.Parameter.KEYWORD_ONLY, False) for name, field in fields]
            continue
        found.append(Argument(each.name, hint, each.kind, each.default is inspect.Parameter.empty))
    return tuple(found)


def methods(owner: type) -> Iterator[Method]:
    """The public methods of a class that the package defines and that take something."""
    for name in dir(owner):
        member = inspect.getattr_static(owner, name)
        function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        if name.startswith("_") or not inspect.isfunction(function) or not function.__module__.startswith(PACKAGE):
            continue
        taken = arguments(function, skip=0 if isinstance(member, staticmethod) else 1)
        if taken:
            yield Method(owner, name, taken)


def constructor(owner: type) -> Method:
    return Method(owner, owner.__name__, arguments(owner.__init__, skip=1))  # type: ignore[misc]  # only its signature


def digest(connection: psycopg.Connection[Any]) -> list[object]:
    """What all tables of the platform hold."""
    tables = connection.execute(
        "SELECT relname FROM pg_class WHERE relnamespace = 'eventsql'::regnamespace AND relkind = 'r' ORDER BY 1"
    ).fetchall()
    rows = sql.SQL(" UNION ALL ").join(
        sql.SQL("SELECT {}, md5(coalesce(string_agg(t::text, ',' ORDER BY t::text), '')) FROM eventsql.{} t").format(
            sql.Literal(table), sql.Identifier(table)
        )
        for (table,) in tables
    )
    # Parallel workers give the rows of the tables in any order.
    return sorted(connection.execute(rows).fetchall())


# Values


def _numbers() -> Iterator[int]:
    yield 1


class _Stranger:
    def __repr__(self) -> str:
        raise RuntimeError("it has no text")


HOSTILE: tuple[Callable[[], object], ...] = (
    *(
        (lambda value=value: value)
        for value in (
            None, True, False, 0, 1, -1, -2, 7, 2**15, 2**31, 2**63, 2**70, 10**5_000, 0.0, 1.5, -0.5, 1e300,
            float("nan"), float("inf"), float("-inf"), 1j, "", " ", "orders", "no_such", "7", "a\x00b", "\ud800",
            "x" * 100_000, "ü" * 300, "Ünïcode", b"", b"orders", (), (1, 2), ("orders",), ..., range(3),
            date(2024, 2, 29), datetime(2024, 2, 29), datetime(2024, 2, 29, tzinfo=UTC),  # noqa: DTZ001 - without a zone
            datetime.max.replace(tzinfo=UTC), datetime.min.replace(tzinfo=UTC), timedelta(1), timedelta(-1),
            timedelta.max, Decimal("NaN"), Decimal(1), UUID(int=7), int, Exception, ValueError("a value"),
        )
    ),
    list, dict, set, object, _Stranger, bytearray, _numbers,
    lambda: [1], lambda: ["orders"], lambda: [None], lambda: ["a\x00b"], lambda: [[]],
    lambda: {"a": 1}, lambda: {"a": "b"}, lambda: {1: 2}, lambda: {"a\x00": "b"}, lambda: {"a": "\ud800"},
    lambda: {"orders"}, lambda: memoryview(b"x"), lambda: (lambda: None), lambda: (each for each in "ab"),
)  # fmt: skip
"""Makes what no user should give, or not everywhere. Made anew each time: a generator can be read once."""


def drawn(method: Method, argument: Argument, examples: int) -> list[Callable[[], object]]:
    """So many of them for an argument, the same in each run."""
    return random.Random(f"{method}({argument.name})").sample(HOSTILE, min(examples, len(HOSTILE)))


def conforms(value: object, hint: Any) -> bool:  # noqa: PLR0911 - a case each
    """Whether a value may be given for a type, as far as its outermost class says."""
    kind = get_origin(hint) or hint
    if kind in (Any, object):
        return True
    if kind in (Union, UnionType):
        return any(conforms(value, each) for each in get_args(hint))
    if kind is Literal:
        return value in get_args(hint)
    if kind is NoneType:
        return value is None
    if kind is collections.abc.Callable:
        return callable(value)
    if kind is float:
        return isinstance(value, int | float | timedelta) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if kind is bytes:
        return isinstance(value, bytes | bytearray | memoryview)
    if kind is collections.abc.Set:
        kind = collections.abc.Collection
    if kind is tuple:
        # Values that keep a tuple take a list, too.
        return isinstance(value, tuple | list)
    if isinstance(value, str | bytes) and issubclass(kind, collections.abc.Iterable) and kind is not str:
        return False
    return isinstance(value, kind)


def valid(argument: Argument, pool: Mapping[Any, Callable[[], object]]) -> object:
    """A value that a method may be given: from the pool, by the argument's name or its type."""
    hint = argument.hint
    named = (argument.name,) if hint in (str, int, float) or get_args(hint) else ()
    for key in (*named, hint, get_origin(hint) or hint):
        if isinstance(key, collections.abc.Hashable) and key in pool:
            return pool[key]()
    for option in get_args(hint) if get_origin(hint) in (Union, UnionType) else ():
        if option in pool or (get_origin(option) or option) in pool:
            return valid(Argument(argument.name, option, argument.kind, argument.required), pool)
    raise LookupError(f"no value is known for {argument.name}: {hint}; add its type to the pool")
