"""Change capture: the changes of any table as events of a topic."""

from eventsql_orchestration.capture.captures import Capture, Captures

__all__ = ["Capture", "Captures"]
