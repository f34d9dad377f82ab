"""`eventsql`, the command line of the platform."""

from eventsql_orchestration.cli.application import main

__all__ = ["main"]
