"""Ctrl-C at a chosen moment of a call."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType


def interrupted(after: int, call: Callable[[], object], *, module: str = "") -> bool:
    """Call `call`, with Ctrl-C at the moment with this number. False if there are fewer moments.

    Python runs signal handlers where a function begins, and after a call. With `module`, only moments in modules whose
    file has this name count.
    """
    left = after

    def interrupt(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal left
        if event in {"call", "return", "c_return"} and module in frame.f_code.co_filename:
            left -= 1
            if left < 0:
                raise KeyboardInterrupt

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
    return False
