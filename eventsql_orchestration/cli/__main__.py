"""`python -m eventsql_orchestration.cli`: the same as `eventsql`, for an interpreter whose scripts are not on PATH."""

from eventsql_orchestration.cli.application import main

if __name__ == "__main__":
    main(prog_name="eventsql")
