"""The collection of garbage in processes that tests start. Python imports this module at the start of each.

A process with Dagster makes hundreds of thousands of objects that live until its end. With Python's own threshold, the
collector visits them many times while they are made, and once more at the end: 1.4 s of 2.8 s of processor time.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys

ALLOCATIONS = 100_000
"""Objects between two collections. Python's default is 700 to 2,000, by its version."""


def leave_memory_to_the_system(process: int) -> None:
    """Exempt all objects from the last collection, as `eventsql` does.

    Other programs, and forked children, end as they do without this module.
    """
    if "dagster" in sys.modules and os.getpid() == process:
        gc.freeze()


gc.set_threshold(ALLOCATIONS)
atexit.register(leave_memory_to_the_system, os.getpid())
