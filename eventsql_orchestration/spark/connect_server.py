"""A Spark Connect server of this machine: one warm Spark for the sessions of many processes."""

from __future__ import annotations

import importlib.util
import secrets
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from eventsql_orchestration.spark import SPARK_CONFIG_VARIABLE, spark_config

HOST: Final = "localhost"
"""Clients send their token over a connection without TLS only to a server of this name."""

AUTHENTICATION: Final = "SPARK_CONNECT_AUTHENTICATE_TOKEN"
"""Names the environment variable in which server and clients have the token of the server."""

_PROGRAM: Final = "eventsql_orchestration.spark.connect_main"

_OF_CLIENTS: Final = ("SPARK_REMOTE", "SPARK_CONNECT_MODE_ENABLED", SPARK_CONFIG_VARIABLE)

_CLIENT: Final = ("grpc", "grpc_status", "google.rpc", "pandas", "pyarrow", "zstandard")


def connect_is_installed() -> bool:
    """Whether Spark and the packages of `pyspark[connect]` are here."""
    return importlib.util.find_spec("pyspark") is not None and all(map(_is_here, _CLIENT))


def _is_here(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


class ConnectServer:
    """A Spark Connect server, which listens on loopback only and serves only clients that know its token.

    `directory` holds its log `spark.log` and its warehouse. `port` and `ui_port` are free TCP ports. `environment` is
    its environment: data sources find `EVENTSQL_DSN` there, and Spark finds JAVA_HOME, or `java` in PATH. `settings`
    are added to the settings of `spark_config`.
    """

    def __init__(
        self,
        directory: Path,
        *,
        port: int,
        ui_port: int,
        environment: Mapping[str, str],
        settings: Mapping[str, str],
    ) -> None:
        self.log = directory / "spark.log"
        self._directory = directory
        self._port = port
        self._token = secrets.token_urlsafe(32)
        self._environment = environment
        self._settings = {
            **spark_config(),
            "spark.ui.enabled": "true",
            "spark.ui.port": str(ui_port),
            "spark.ui.killEnabled": "false",
            "spark.sql.warehouse.dir": str(directory / "warehouse"),
            **settings,
            "spark.connect.grpc.binding.address": "127.0.0.1",
            "spark.connect.grpc.binding.port": str(port),
        }

    @property
    def remote(self) -> str:
        """The setting `spark.remote` of the clients."""
        return f"sc://{HOST}:{self._port}"

    @property
    def client_environment(self) -> dict[str, str]:
        """The variables of the clients' environment: they have the token, and end a session with its process."""
        return {AUTHENTICATION: self._token, "SPARK_CONNECT_RELEASE_SESSION_ON_EXIT": "true"}

    def start(self, *, pass_fds: Sequence[int] = ()) -> subprocess.Popen[bytes]:
        """Start the server in a session of its own. Clients wait for it by themselves."""
        import pyspark  # noqa: PLC0415 - an optional package

        environment = {
            **{name: value for name, value in self._environment.items() if name not in _OF_CLIENTS},
            **self.client_environment,
            "SPARK_HOME": str(Path(pyspark.__file__).parent),
            "PYSPARK_PYTHON": self._environment.get("PYSPARK_PYTHON", sys.executable),
            # By default, it announces this machine's address.
            "SPARK_LOCAL_IP": "127.0.0.1",
        }
        settings = (f"{name}={value}" for name, value in self._settings.items())
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", _PROGRAM, *settings],
                cwd=self._directory, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True, pass_fds=tuple(pass_fds),
            )  # fmt: skip
