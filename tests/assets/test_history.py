"""The asset that publishes a git repository's history: each commit once, in rounds."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest

from assets.churn import published as published_module
from assets.churn.effects import FILE_CHANGES
from assets.churn.git_history import LAST_COMMIT
from assets.churn.pipeline import file_changes
from assets.churn.published import last_commit
from eventsql_orchestration import EventSQL, Publication
from eventsql_orchestration.dagster import PUBLISHED_EVENTS, EventSQLResource
from eventsql_orchestration.errors import DatabaseBusyError

KEY = file_changes.key.to_python_identifier()


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as made:
        yield made


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git(tmp_path, "init", "--quiet")
    return tmp_path


def git(repository: Path, *arguments: str) -> None:
    author = ["-c", "user.name=someone", "-c", "user.email=someone@example.com", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(repository), *author, *arguments], check=True)


def commit(repository: Path, name: str) -> None:
    (repository / name).write_text("a line\n")
    git(repository, "add", name)
    git(repository, "commit", "--quiet", "--message", name)


def round_of(instance: dg.DagsterInstance, dsn: str, repository: str) -> dg.ExecuteInProcessResult:
    return dg.materialize(
        [file_changes],
        instance=instance,
        resources={"eventsql": EventSQLResource(dsn=dsn)},
        run_config=dg.RunConfig(ops={KEY: {"config": {"repository": repository}}}),
        raise_on_error=False,
    )


def test_a_commit_is_published_once_whatever_rounds_without_commits_lie_between(
    instance: dg.DagsterInstance, platform: EventSQL, dsn: str, repository: Path
) -> None:
    platform.registry.register_topic(FILE_CHANGES)
    published, last = [], []
    for name in ("first", None, "second", None):
        if name is not None:
            commit(repository, name)
        result = round_of(instance, dsn, str(repository))
        (materialization,) = result.asset_materializations_for_node(KEY)
        published.append(materialization.metadata[PUBLISHED_EVENTS].value)
        last.append(materialization.metadata[LAST_COMMIT].value)
    assert published == [1, 0, 1, 0]
    assert last[0] == last[1] != last[2] == last[3]
    assert [event.key for event in platform.reader.read(FILE_CHANGES.name)] == ["first", "second"]


def test_a_round_that_was_killed_before_it_reported_is_not_published_again(
    instance: dg.DagsterInstance, platform: EventSQL, dsn: str, repository: Path
) -> None:
    platform.registry.register_topic(FILE_CHANGES)
    for name in ("first", "second"):
        commit(repository, name)
        assert round_of(instance, dsn, str(repository)).success
        instance.wipe_assets([file_changes.key])
        # Events of others do not say how far the history is published.
        platform.publisher.publish(Publication(FILE_CHANGES.name, b"{}", key="other"))
    keys = [event.key for event in platform.reader.read(FILE_CHANGES.name)]
    assert [key for key in keys if key != "other"] == ["first", "second"]


def test_two_repositories_in_turns_publish_each_commit_once(
    instance: dg.DagsterInstance, platform: EventSQL, dsn: str, tmp_path: Path
) -> None:
    platform.registry.register_topic(FILE_CHANGES)
    repositories = [tmp_path / name for name in ("one", "other")]
    for repository in repositories:
        repository.mkdir()
        git(repository, "init", "--quiet")
        commit(repository, f"of {repository.name}")
    for repository in (*repositories, *repositories):
        assert round_of(instance, dsn, str(repository)).success
    assert [event.key for event in platform.reader.read(FILE_CHANGES.name)] == ["of one", "of other"]


def test_rounds_take_turns_by_a_pool() -> None:
    # tests/deploy/test_spark.py has the limit of each pool.
    assert file_changes.op.pool == FILE_CHANGES.name


def test_a_repository_that_is_named_and_has_no_history_fails_the_round(
    instance: dg.DagsterInstance, platform: EventSQL, dsn: str, tmp_path: Path
) -> None:
    platform.registry.register_topic(FILE_CHANGES)
    assert not round_of(instance, dsn, str(tmp_path / "nowhere")).success


def test_the_working_directory_need_not_have_a_history(
    instance: dg.DagsterInstance, platform: EventSQL, dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform.registry.register_topic(FILE_CHANGES)
    monkeypatch.chdir(tmp_path)
    assert round_of(instance, dsn, ".").success


def test_a_round_does_not_wait_without_end_for_events_that_nobody_can_transfer(
    platform: EventSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(published_module, "_TRANSFER_SECONDS", 0.0)
    platform.registry.register_topic(FILE_CHANGES)
    platform.publisher.publish(Publication(FILE_CHANGES.name, b'{"repo": "here"}', metadata={LAST_COMMIT: "abc"}))
    with platform.database.transaction() as connection:
        connection.execute(
            "SELECT FROM eventsql.event_buffer_lock WHERE eql_topic = %s FOR UPDATE", [FILE_CHANGES.name]
        )
        with pytest.raises(DatabaseBusyError):
            last_commit(platform, Path("here"))
    assert last_commit(platform, Path("here")) == "abc"
