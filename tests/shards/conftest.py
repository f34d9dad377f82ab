"""What the tests of shards share: several databases on the session's one server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import TypeAlias

import pytest

from eventsql_orchestration import EventSQL, Publication
from tests.conftest import TEMPLATE, Administrator
from tests.fixtures import Spawn, Until, Worker, until

__all__ = ["Databases", "Open", "Spawn", "Until", "Worker", "until"]

Databases: TypeAlias = Callable[..., list[str]]
Open: TypeAlias = Callable[..., EventSQL]


def publication(key: str | None, number: int = 0) -> Publication:
    """An event of the topic `orders` whose value is a number."""
    return Publication("orders", b"%d" % number, key=key)


@pytest.fixture
def databases(administrator: Administrator) -> Iterator[Databases]:
    """Makes migrated databases. The first are copies of those that are given, and the others hold nothing."""
    with ExitStack() as stack:

        def copy(number: int, filled: Sequence[str] = ()) -> list[str]:
            templates = [*filled, *[TEMPLATE] * (number - len(filled))]
            return [stack.enter_context(administrator.copied(template=template)) for template in templates]

        yield copy


@pytest.fixture
def opened() -> Iterator[Open]:
    """Opens platforms on several databases, in which events move only when the test transfers them."""
    with ExitStack() as stack:

        def open_platform(*dsns: str, transfer: bool = False, **options: object) -> EventSQL:
            return stack.enter_context(EventSQL(*dsns, transfer=transfer, **options))  # type: ignore[arg-type]

        yield open_platform
