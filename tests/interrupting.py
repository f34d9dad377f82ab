"""A signal at a chosen moment of a call."""

from __future__ import annotations

import _thread
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection
from types import FrameType
from typing import NoReturn


def _control_c() -> NoReturn:
    raise KeyboardInterrupt


def interrupted(
    after: int, call: Callable[[], object],
    *, module: str = "", handler: Callable[[], object] = _control_c,
    events: Collection[str] = ("call", "return", "c_return"),
) -> bool:  # fmt: skip
    """Call `call`, with a signal at the moment with this number. False if there are fewer moments.

    The signal is Ctrl-C, or another with a `handler` of its own.

    Python runs signal handlers where a function begins, and after a call. With `module`, only moments in modules whose
    file has this name count. `events` are those of `sys.setprofile`. A generator sees no error of "call" and "return".
    """
    left = after

    def interrupt(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal left
        if event in events and module in frame.f_code.co_filename:
            left -= 1
            if left == -1:
                handler()

    profile = sys.getprofile()
    sys.setprofile(interrupt)
    try:
        call()
    except KeyboardInterrupt:
        return True
    except RuntimeError as error:
        # Interrupted in the middle of a wait, `Thread.start` raises this error.
        if not isinstance(error.__context__, KeyboardInterrupt):
            raise
        return True
    finally:
        sys.setprofile(profile)
    return left < 0


def interrupt_where_it_waits(number: signal.Signals = signal.SIGINT) -> None:
    """Start a thread that interrupts the main thread where it stands still, after the end of standard input.

    As after a signal that arrives just before a wait begins, nothing wakes the main thread.
    """
    main = threading.get_ident()

    def interrupt() -> None:
        sys.stdin.readline()
        place = None
        while place != (place := (sys._current_frames()[main].f_code, sys._current_frames()[main].f_lasti)):
            time.sleep(0.05)
        _thread.interrupt_main(number)

    threading.Thread(target=interrupt, daemon=True).start()
