"""With any arguments, a command ends with exit code 0, 1 or 2, and says why in one line, never with a traceback."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from eventsql_orchestration import Consumer, EventSQL, Topic
from eventsql_orchestration.cli import main

EXAMPLES = int(os.environ.get("EVENTSQL_FUZZ_EXAMPLES", "3"))

HOSTILE = (
    "", " ", "-1", "0", "7", "1.5", "nan", "inf", "1e400", "9" * 30, "9" * 5_000, "no_such", "a b", "a\tb", "ü",
    "\udcff", "x" * 100_000, "a=b", "=", "2024-02-30", "0001-01-01", "9999-12-31T23:59:59-23:59", "%s",
    "'; --", "{}", "\\x00",
)  # fmt: skip

REQUIRED = {"topic": "orders", "consumer": "audit", "offset": "1", "new": "postgresql://nobody@127.0.0.1:1/nowhere"}

ENDING = {"transfer": ("--once",), "top": ("--count=1",)}
"""What makes a command end that would go on."""

APART = {"dev", "bench", "server", "serve"}
"""They start programs, measure for a while, or serve until they are told to end."""


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    for name, command in group.commands.items():
        if name in APART:
            continue
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            # One that is loaded when it is called has its parameters then.
            context = command.make_context(name, [], resilient_parsing=True)
            yield (*path, name), context.command


def lines(path: tuple[str, ...], command: click.Command) -> Iterator[list[str]]:
    """Calls of a command with one wrong value each."""
    taken = [each for each in command.params if not (isinstance(each, click.Option) and each.is_flag)]
    for wrong in taken:
        for value in random.Random(f"{path} {wrong.name}").sample(HOSTILE, min(EXAMPLES, len(HOSTILE))):
            options: list[str] = [*ENDING.get(path[0], ())]
            arguments: list[str] = []
            for each in taken:
                text = value if each is wrong else REQUIRED.get(each.name or "") if each.required else None
                if text is None:
                    continue
                if isinstance(each, click.Option):
                    options.append(f"{each.opts[0]}={text}")
                else:
                    arguments.append(text)
            yield [*path, *options, "--", *arguments]


@pytest.fixture(autouse=True)
def alone(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(str(tmp_path))
    for name in [name for name in os.environ if name.startswith("EVENTSQL_")]:
        monkeypatch.delenv(name)


def prepare(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders", 2)).register_topic(Topic("orders_dlt"))
    platform.registry.register_consumer(Consumer("orders", "audit"))


@pytest.mark.prepared.with_args(prepare)
@pytest.mark.parametrize(("path", "command"), [pytest.param(*each, id=" ".join(each[0])) for each in commands(main)])
def test_a_command_with_a_wrong_value_ends_with_a_line(dsn: str, path: tuple[str, ...], command: click.Command) -> None:
    faults = []
    for line in lines(path, command):
        result = CliRunner().invoke(main, ["--dsn", dsn, *line], input="")
        said = result.stderr.strip().splitlines()
        failed = result.exit_code != 0
        if result.exit_code not in {0, 1, 2} or (failed and len(said) != 1) or "unexpected " in result.stderr:
            faults.append(f"{ascii(line)[:200]} ends with {result.exit_code}: {ascii(result.stderr)[:300]}")
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("option", ["--dsn", "--schema", "--home", "--shard"])
@pytest.mark.parametrize("value", ["", " ", "a\tb", "x" * 5_000, "\udcff", "postgresql://", "7"])
def test_a_wrong_option_of_the_program_ends_with_a_line(dsn: str, option: str, value: str) -> None:
    base = [] if option in {"--dsn", "--home"} else ["--dsn", dsn]
    # `server status` starts no server in the home.
    command = ["server", "status"] if option == "--home" else ["topic", "list"]
    result = CliRunner().invoke(main, [*base, f"{option}={value}", *command])
    assert result.exit_code in {0, 1, 2}
    assert result.exit_code == 0 or len(result.stderr.strip().splitlines()) == 1, result.stderr
    assert "unexpected " not in result.stderr
