"""Findings of `eventsql doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import partial


class Status(StrEnum):
    """The weight of a finding. Only problems make the command fail."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: its name, its result, and the command that fixes it."""

    status: Status
    check: str
    message: str
    remedy: str | None = None


ok = partial(Finding, Status.OK)
warning = partial(Finding, Status.WARNING)
problem = partial(Finding, Status.PROBLEM)
