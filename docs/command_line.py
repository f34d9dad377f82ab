"""The program as its reference shows it: with all commands loaded."""

from eventsql_orchestration.cli.application import whole_program

program = whole_program()
