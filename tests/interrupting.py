"""A signal at a chosen moment of a call."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import NoReturn


def _control_c() -> NoReturn:
    raise KeyboardInterrupt


def interrupted(
    after: int, call: Callable[[], object], *, module: str = "", handler: Callable[[], object] = _control_c
) -> bool:
    """Call `call`, with a signal at the moment with this number. False if there are fewer moments.

    The signal is Ctrl-C, or another with a `handler` of its own.

    Python runs signal handlers where a function begins, and after a call. With `module`, only moments in modules whose
    file has this name count.
    """
    left = after

    def interrupt(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal left
        if event in {"call", "return", "c_return"} and module in frame.f_code.co_filename:
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
