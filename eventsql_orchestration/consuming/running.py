"""Running consumers of a process, and how they end."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Protocol, Self, TypeVar

from eventsql_orchestration.boundary import checked
from eventsql_orchestration.threads import others_alive
from eventsql_orchestration.validation import Duration, in_seconds


@checked
class Running(ABC):
    """A running consumer of this process, or workers of a queue. It ends with `stop`, or with its `with` block."""

    def stop(self, timeout: Duration = 10.0) -> bool:
        """Finish the current batches and end.

        False if some batches still run after `timeout` seconds. They are then rolled back, and later writes by their
        handlers fail. Their partitions are given up, so that other processes may consume them.

        A handler may call this. The call then returns at once, and says whether the other batches have ended. The
        handler's own batch is finished, and no other batch begins.
        """
        return stop_all([self], time.monotonic() + in_seconds(timeout))

    @abstractmethod
    def stop_soon(self) -> None:
        """Begin no more batches; returns at once."""

    def await_end(self, deadline: float) -> bool:
        """The rest of `stop`, until a time of `time.monotonic`."""
        threads = self.threads()
        if threading.current_thread() in threads:
            # Two handlers that stop their consumption would wait for each other, and roll each other back.
            return not others_alive(threads)
        return self._end(deadline)

    @abstractmethod
    def threads(self) -> Collection[threading.Thread]:
        """The threads that call the handler."""

    @abstractmethod
    def _end(self, deadline: float) -> bool:
        """As `await_end`, called by another thread."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


AnyRunning = TypeVar("AnyRunning", bound=Running)


class Keeper(Protocol):
    """The consumers of a platform or of a shard."""

    def keep(self, running: AnyRunning) -> AnyRunning: ...


def stop_all(running: Collection[Running], deadline: float) -> bool:
    """Stop consumers together; gives whether all of them ended until `deadline`, a time of `time.monotonic`."""
    for each in running:
        each.stop_soon()
    # Wait for each, without stopping at the first False: the last batches must be rolled back too.
    ended = [each.await_end(deadline) for each in running]
    return all(ended)
