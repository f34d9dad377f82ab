"""Change capture: the changes of any table as events of a topic."""

from eventsql_orchestration.capture.captures import Captures
from eventsql_orchestration.capture.values import Capture, drop_command

__all__ = ["Capture", "Captures", "drop_command"]
