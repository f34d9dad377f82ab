"""The signatures of functions that a user gives."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable

if sys.version_info >= (3, 14):
    from annotationlib import Format


def signature_of(function: Callable[..., object], *, follow_wrapped: bool = True) -> inspect.Signature:
    """The signature of a function. Its annotations may name types that only type checkers import.

    From Python 3.14 on, annotations with these names need no quotes, and evaluating them fails.
    """
    if sys.version_info >= (3, 14):
        return inspect.signature(function, follow_wrapped=follow_wrapped, annotation_format=Format.FORWARDREF)
    return inspect.signature(function, follow_wrapped=follow_wrapped)
