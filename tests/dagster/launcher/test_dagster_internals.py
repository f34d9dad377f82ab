"""Each private name of Dagster that the launcher uses still means what the launcher relies on."""

from __future__ import annotations

import importlib
import inspect
import os
from pathlib import Path
from typing import Any
from unittest import mock

import dagster as dg
import pytest
from dagster._cli.api import _execute_run_command_body, _resume_run_command_body
from dagster._core import code_pointer
from dagster._core.code_pointer import FileCodePointer, ModuleCodePointer
from dagster._core.remote_origin import GrpcServerCodeLocationOrigin
from dagster._core.remote_representation.code_location import GrpcServerCodeLocation
from dagster._core.workspace.context import BaseWorkspaceRequestContext

from eventsql_orchestration.dagster.launcher import dagster_internals as internals


@pytest.fixture
def unpatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo after the test the changes that the load of a location makes in Dagster."""
    monkeypatch.setattr(code_pointer, "load_python_file", code_pointer.load_python_file)


def origin(pointer: code_pointer.CodePointer) -> internals.RepositoryPythonOrigin:
    return internals.RepositoryPythonOrigin("python", pointer)


def test_the_bodies_of_the_commands_that_execute_and_resume_runs_take_a_run_an_instance_and_a_writer() -> None:
    for body in (_execute_run_command_body, _resume_run_command_body):
        assert list(inspect.signature(body).parameters) == [
            "run_id", "instance", "write_stream_fn", "set_exit_code_on_failure"
        ]  # fmt: skip


@pytest.mark.parametrize("name", internals._IMPORTED_BY_RUNS)
def test_a_module_that_runs_import_is_imported_before_the_fork(name: str) -> None:
    assert importlib.import_module(name).__name__ == name


def test_a_file_of_definitions_is_executed_once_in_a_process(
    tmp_path: Path, unpatched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "counted_definitions.py"
    file.write_text("import dagster as dg\nprint('executed')\ndefs = dg.Definitions()\n")
    executed: list[object] = []
    monkeypatch.setattr("builtins.print", executed.append)
    pointer = FileCodePointer(str(file), "defs", str(tmp_path))
    for _ in range(2):
        internals.load_location(origin(pointer))
    assert executed == ["executed"]


def test_the_working_directory_is_the_one_of_the_pointer() -> None:
    assert internals.working_directory(origin(ModuleCodePointer("module", "defs", "/where"))) == "/where"
    assert internals.working_directory(origin(ModuleCodePointer("module", "defs", None))) == os.getcwd()  # noqa: PTH109


def test_an_origin_and_an_instance_survive_their_way_to_the_server() -> None:
    place = origin(FileCodePointer("definitions.py", "defs", "/where"))
    assert dg.deserialize_value(dg.serialize_value(place), internals.RepositoryPythonOrigin) == place
    with dg.instance_for_test() as instance:
        ref = instance.get_ref()
        assert dg.deserialize_value(dg.serialize_value(ref), internals.InstanceRef) == ref
        internals.import_storage(ref)


def test_a_location_has_the_variables_of_its_env_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OF_LOCATION", raising=False)
    (tmp_path / ".env").write_text("OF_LOCATION=here\n")
    with dg.instance_for_test() as instance:
        internals.add_location_environment(instance.get_ref(), "location")
    assert os.environ.pop("OF_LOCATION") == "here"


def test_an_explanation_of_a_crash_names_signal_and_exit_code() -> None:
    assert "SIGKILL" in internals.get_run_crash_explanation(prefix="It", exit_code=-9)
    assert "3" in internals.get_run_crash_explanation(prefix="It", exit_code=3)


def test_the_settings_of_run_monitoring_and_of_the_queue_are_known() -> None:
    monitored = {"run_monitoring": {"enabled": True, "max_resume_run_attempts": 2}}
    queued = {"run_coordinator": {"module": "dagster.core.run_coordinator", "class": "QueuedRunCoordinator"}}
    launcher = {"run_launcher": {"module": "eventsql_orchestration.dagster", "class": "PreforkRunLauncher"}}
    with dg.instance_for_test(overrides={**monitored, **queued, **launcher}) as instance:
        assert internals.resumes_runs(instance)
        assert internals.launched_by_queue(instance)
    immediate = {"run_coordinator": {"module": "dagster.core.run_coordinator", "class": "DefaultRunCoordinator"}}
    with dg.instance_for_test(overrides=immediate) as instance:
        assert not internals.resumes_runs(instance)
        assert not internals.launched_by_queue(instance)


def test_without_a_workspace_no_code_server_is_known() -> None:
    assert internals.code_server(None, "location") == internals.CodeServer("", remote=False)


@pytest.mark.parametrize(
    ("address", "remote"),
    [({"host": "code", "port": 4000}, True), ({"host": "localhost", "port": 4000}, False), ({"socket": "/s"}, False)],
    ids=["another host", "this host", "a socket"],
)
def test_a_code_server_that_dagster_did_not_start_is_remote_unless_its_address_is_of_this_machine(
    address: dict[str, Any], remote: bool
) -> None:
    found = mock.create_autospec(GrpcServerCodeLocation, instance=True, server_id="one")
    found.origin = GrpcServerCodeLocationOrigin(location_name="location", **{"host": "localhost", **address})
    workspace = mock.create_autospec(BaseWorkspaceRequestContext, instance=True)
    workspace.get_code_location.return_value = found
    assert internals.code_server(workspace, "location") == internals.CodeServer("one", remote=remote)
