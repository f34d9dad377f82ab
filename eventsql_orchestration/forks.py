"""Forked processes: connections, threads and their locks stay with the parent, and the child's objects begin anew."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

logger = logging.getLogger(__name__)

Owner = TypeVar("Owner")
Kept = TypeVar("Kept")

OF_PARENTS: Final[list[object]] = []
"""Connections of the parent processes. They are never freed: freeing one uses locks and memory that a thread of the
parent may have been using at the fork."""

_BEGIN_ANEW: Final[weakref.WeakKeyDictionary[Any, Callable[[Any], None]]] = weakref.WeakKeyDictionary()


def after_fork(owner: Owner, begin_anew: Callable[[Owner], None]) -> None:
    """Call `begin_anew(owner)` in each process that is forked from this one while the object exists.

    The object drops its connections there without closing them, because the parent goes on to use them. It drops its
    threads, which do not exist there, and takes new locks: a thread of the parent can have held the old locks.
    """
    _BEGIN_ANEW[owner] = begin_anew


class ProcessLock:
    """A lock of this process. A forked process has another, which is free."""

    def __init__(self) -> None:
        self._begin_anew()
        after_fork(self, ProcessLock._begin_anew)

    def _begin_anew(self) -> None:
        self.lock = threading.Lock()


class ProcessSet(Generic[Kept]):
    """Objects of this process, for as long as something else keeps them. A forked process begins with none of them."""

    def __init__(self) -> None:
        self._begin_anew()
        after_fork(self, ProcessSet._begin_anew)

    def _begin_anew(self) -> None:
        # A set cannot be read while another thread adds to it.
        self._lock, self._kept = threading.Lock(), weakref.WeakSet[Kept]()

    def add(self, each: Kept) -> None:
        with self._lock:
            self._kept.add(each)

    def all(self, *, forget: bool = False) -> list[Kept]:
        with self._lock:
            found = list(self._kept)
            if forget:
                self._kept.clear()
        return found


def _begin_anew() -> None:
    for owner, begin_anew in list(_BEGIN_ANEW.items()):
        try:
            begin_anew(owner)
        except Exception:
            # The other objects must still begin anew, because they would use the parent's connections.
            logger.exception("%r does not begin anew in a forked process", owner)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)
