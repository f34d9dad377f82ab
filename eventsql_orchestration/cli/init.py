"""`eventsql init`: a small project that runs."""

from __future__ import annotations

import importlib.util
import keyword
import re
import shlex
import sys
from pathlib import Path
from typing import Annotated, Final

import click

from eventsql_orchestration.cli.context import CliContext
from eventsql_orchestration.cli.output import say
from eventsql_orchestration.cli.parameters import argument, command, option
from eventsql_orchestration.errors import ConfigurationError

_FILES: Final = {
    "pyproject.toml": """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{project}"
version = "0.1.0"
requires-python = ">=3.11"
dependencies = ["eventsql-orchestration[dagster,local]"]

[dependency-groups]
dev = ["pytest>=8"]

[tool.hatch.build.targets.wheel]
packages = ["src/{module}"]

# `eventsql dev`, `dg` and Dagster find the definitions by this.
[tool.dg]
directory_type = "project"

[tool.dg.project]
root_module = "{module}"

[tool.pytest.ini_options]
pythonpath = ["src"]
testpaths = ["tests"]
""",
    ".gitignore": """\
# The embedded PostgreSQL and Dagster's files.
.eventsql/
.tmp_dagster_home_*/
.venv/
__pycache__/
""",
    "README.md": """\
# {project}

It needs Python 3.11 or newer. In this directory, install it with its dependencies, into an environment of its own:

```
python3 -m venv .venv
. .venv/bin/activate
pip install --editable . pytest
```

(With uv: `uv sync`, and `uv run` before each command below. With a clone of eventsql-orchestration instead of its
package: `pip install '/path/to/the/clone[dagster,local]'` before the last command.) Then

```
eventsql dev
```

runs PostgreSQL, Dagster's UI and daemon, and this project, until Ctrl-C. In another terminal, in this directory, with
the same environment:

```
echo '{{"order": 1, "item": "tea"}}' | eventsql publish order_placed
eventsql lag
pytest
```

`src/{module}/stock.py` has a topic, a consumer of it as an asset, and the table that the consumer fills.
`src/{module}/definitions.py` is the code location: give `build_definitions` each further consumer. The directory `docs`
of eventsql-orchestration has examples of queues, the event store, views, and consumers that compute with Spark.
""",
    "src/{module}/__init__.py": "",
    "src/{module}/definitions.py": '''\
"""The code location of this project."""

from eventsql_orchestration.dagster import build_definitions

from {module}.stock import create_table, stock

defs = build_definitions([stock], prepare=create_table)
''',
    "src/{module}/stock.py": '''\
"""A topic, a consumer of it, and the table that the consumer fills."""

import json

from eventsql_orchestration import Connection, Event, Shard, Topic
from eventsql_orchestration.dagster import consumer_asset

ORDER_PLACED = Topic("order_placed", partitions=2)


@consumer_asset(topic=ORDER_PLACED, consumer="stock", partitioned=True)
def stock(events: list[Event], connection: Connection) -> None:
    """The orders, each with its item."""
    for event in events:
        placed = json.loads(event.value)
        # These writes commit together with the consumer's offset. A backfill may give an event again: the order's
        # number keeps it from counting twice, while `SET pieces = pieces + 1` would add to the sum again.
        connection.execute(
            "INSERT INTO ordered VALUES (%s, %s) ON CONFLICT (id) DO UPDATE SET item = excluded.item",
            (placed["order"], placed["item"]),
        )


def create_table(shard: Shard) -> None:
    """Each run of the job `register` calls it."""
    with shard.database.transaction() as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS ordered (id bigint PRIMARY KEY, item text)")
''',
    "tests/test_stock.py": '''\
"""The consumer, on a PostgreSQL of the test's own."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from eventsql_orchestration import EventSQL, Publication
from eventsql_orchestration.dagster import build_definitions
from eventsql_orchestration.database.embedded import EmbeddedPostgres

from {module}.stock import create_table, stock


@pytest.fixture
def platform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EventSQL]:
    server = EmbeddedPostgres(tmp_path / "postgres")
    try:
        dsn = server.start().dsn
        monkeypatch.setenv("EVENTSQL_DSN", dsn)
        with EventSQL(dsn, transfer=False) as platform:
            yield platform
    finally:
        server.destroy()


def test_each_order_counts_once(platform: EventSQL) -> None:
    defs = build_definitions([stock], prepare=create_table)
    assert defs.resolve_job_def("register").execute_in_process().success
    # Order 2 comes twice.
    for order, item in [(1, "tea"), (2, "rice"), (2, "rice"), (3, "tea")]:
        placed = json.dumps({{"order": order, "item": item}}).encode()
        platform.publisher.publish(Publication("order_placed", placed, key=str(order)))
    platform.transfer.run_once()

    # The second run finds nothing new.
    for _ in range(2):
        assert defs.resolve_job_def("consume_stock").execute_in_process().success

    with platform.database.connection() as connection:
        ordered = connection.execute("SELECT item, count(*) FROM ordered GROUP BY item ORDER BY item").fetchall()
    assert ordered == [("rice", 1), ("tea", 2)]
''',
}


@command()
def init(
    context: CliContext,  # noqa: ARG001 - every command takes it
    directory: Annotated[Path | None, argument(type=click.Path(path_type=Path, file_okay=False), metavar="[DIR]")],
    name: Annotated[str | None, option("Name of the project; by default the name of the directory.", metavar="NAME")],
) -> None:
    """Make a small project in DIR, by default in this directory: a topic, a consumer as a Dagster asset, and a test.

    `eventsql dev` runs it. A file that exists is never changed.
    """
    root = directory or Path()
    project = name or root.resolve().name
    module = _module(project)
    # The module's name is also a valid distribution name once its underscores are dashes.
    names = {"module": module, "project": module.replace("_", "-")}
    files = {root / path.format(**names): text.format(**names) for path, text in _FILES.items()}
    if existing := sorted(str(file) for file in files if file.exists() or file.is_symlink()):
        raise ConfigurationError(
            f"nothing was written: name a new directory, because this one has {', '.join(existing)}"
        )
    for file, text in files.items():
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            # A failed write names no file.
            raise ConfigurationError(f"{error.filename or file} cannot be written: {error.strerror}") from error

    go = "" if root.resolve() == Path.cwd() else f"cd {shlex.quote(str(root))} && "
    say(f"made project {names['project']!r} in {root.resolve()}: run it with `{go}eventsql dev`")


def _module(project: str) -> str:
    """The name of a project's module. Raises `ConfigurationError` if there can be no module of that name."""
    module = re.sub(r"[^a-z0-9]+", "_", project.lower()).strip("_")
    if not module.isidentifier() or keyword.iskeyword(module):
        raise ConfigurationError(f"a Python module cannot be named after {project!r}: name the project with --name")
    if module in sys.stdlib_module_names or importlib.util.find_spec(module) is not None:
        raise ConfigurationError(f"there is a Python module {module!r} already: name the project with --name")
    return module
