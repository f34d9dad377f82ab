"""Every private name of Dagster that the launcher uses, each with a test in test_dagster_internals.py."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from dataclasses import dataclass
from typing import Any, Final, cast

import dagster as dg
from dagster._cli.api import _execute_run_command_body, _resume_run_command_body
from dagster._cli.utils import get_instance_for_cli
from dagster._core import code_pointer
from dagster._core.errors import DagsterUserCodeUnreachableError
from dagster._core.instance import InstanceRef
from dagster._core.launcher.base import (
    CheckRunHealthResult,
    LaunchRunContext,
    ResumeRunContext,
    RunLauncher,
    WorkerStatus,
)
from dagster._core.origin import RepositoryPythonOrigin
from dagster._core.remote_origin import GrpcServerCodeLocationOrigin
from dagster._core.remote_representation.code_location import GrpcServerCodeLocation
from dagster._core.secrets.env_file import get_env_var_dict
from dagster._core.storage.tags import GRPC_INFO_TAG
from dagster._core.workspace.context import BaseWorkspaceRequestContext, IWorkspaceProcessContext
from dagster._serdes import ConfigurableClass, ConfigurableClassData
from dagster._utils import get_run_crash_explanation
from dagster._utils.hosted_user_process import recon_repository_from_origin
from dagster._utils.interrupts import capture_interrupts

__all__ = [
    "GRPC_INFO_TAG",
    "CheckRunHealthResult",
    "CodeServer",
    "ConfigurableClass",
    "ConfigurableClassData",
    "DagsterUserCodeUnreachableError",
    "IWorkspaceProcessContext",
    "InstanceRef",
    "LaunchRunContext",
    "RepositoryPythonOrigin",
    "ResumeRunContext",
    "RunLauncher",
    "WorkerStatus",
    "add_location_environment",
    "capture_interrupts",
    "code_server",
    "code_servers",
    "execute_run",
    "get_instance_for_cli",
    "get_run_crash_explanation",
    "import_storage",
    "launched_by_queue",
    "load_location",
    "resumes_runs",
    "working_directory",
]


_IMPORTED_BY_RUNS: Final = (
    "dagster._core.execution.plan.active",
    "dagster._core.executor.in_process",
    "dagster._core.instance.factory",
    "dagster._core.storage.migration.utils",
    "dagster._core.system_config.composite_descent",
    "fsspec.implementations.local",
    "upath.implementations.local",
)
"""Modules that Dagster imports only in a run, found by comparing `sys.modules` of a run and its server."""

_POOLED_STORAGE: Final = "eventsql_orchestration.dagster.pooled_storage"
"""Named as text and not imported here: the import takes a second, and only instances with this storage need it."""


def execute_run(instance: dg.DagsterInstance, run_id: str, *, resume: bool) -> None:
    """Execute a run in this process, as `dagster api execute_run` and `dagster api resume_run` do."""
    body = _resume_run_command_body if resume else _execute_run_command_body
    body(run_id, instance, lambda _event: None, set_exit_code_on_failure=False)


def load_location(origin: RepositoryPythonOrigin) -> None:
    """Import a repository and build its jobs. Later loads in this process and its forks find them.

    Without the cache, a location that is a file would execute the file again at each load.
    """
    code_pointer.load_python_file = functools.cache(code_pointer.load_python_file)
    recon_repository_from_origin(origin).get_definition().get_all_jobs()


def import_storage(ref: InstanceRef) -> None:
    """Import the modules that an instance and a run need, without a connection."""
    for data in ref:
        if isinstance(data, ConfigurableClassData) and data is not ref.run_launcher_data:
            module = importlib.import_module(data.module_name)
            if data.module_name == _POOLED_STORAGE:
                # The launcher's instance has created the tables.
                module.tables_exist()
    for name in _IMPORTED_BY_RUNS:
        # Another version of Dagster may have the module elsewhere. Then each run imports it.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def add_location_environment(ref: InstanceRef, location: str) -> None:
    """Set the variables of `.env` and of the instance's secrets, as a code server does."""
    os.environ.update(get_env_var_dict(os.getcwd()))  # noqa: PTH109 - as Dagster calls it
    if (loader := ref.secrets_loader) is not None:
        os.environ.update(loader.get_secrets_for_environment(location))


def working_directory(origin: RepositoryPythonOrigin) -> str:
    """The directory from which a location's code is imported."""
    return cast("str | None", getattr(origin.code_pointer, "working_directory", None)) or os.getcwd()  # noqa: PTH109


@dataclass(frozen=True, slots=True)
class CodeServer:
    """The code server of a location.

    A reload changes `id`, which is empty if no server is known. `remote` is true if Dagster did not start the server
    and the server may be on another machine.
    """

    id: str = ""
    remote: bool = False


def code_server(workspace: BaseWorkspaceRequestContext | None, location: str) -> CodeServer:
    found = None if workspace is None else workspace.get_code_location(location)
    if not isinstance(found, GrpcServerCodeLocation):
        return CodeServer()
    origin = found.origin
    remote = (
        isinstance(origin, GrpcServerCodeLocationOrigin)
        and origin.socket is None
        and origin.host not in {"localhost", "127.0.0.1", "::1"}
    )
    return CodeServer(found.server_id, remote)


def code_servers(workspace: IWorkspaceProcessContext[Any]) -> dict[str, str]:
    """The present locations of a workspace, each with its code server's id; the id is empty if no server is known."""
    now = workspace.create_request_context()
    return {name: code_server(now, name).id if now.has_code_location(name) else "" for name in now.code_location_names}


def launched_by_queue(instance: dg.DagsterInstance) -> bool:
    """Whether the daemon launches every run of an instance."""
    return isinstance(instance.run_coordinator, dg.QueuedRunCoordinator)


def resumes_runs(instance: dg.DagsterInstance) -> bool:
    """Whether run monitoring starts a new process for a run whose process died."""
    return instance.run_monitoring_enabled and instance.run_monitoring_max_resume_run_attempts > 0
