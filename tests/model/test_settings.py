"""Settings come from arguments, then the environment, then eventsql.toml; a mistake names the setting, no secret."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from eventsql_orchestration.errors import ConfigurationError
from eventsql_orchestration.settings import Settings
from eventsql_orchestration.validation import DEFAULT_SCHEMA


@pytest.fixture(autouse=True)
def _in_an_empty_directory_with_a_clean_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in os.environ:
        if name.upper().startswith("EVENTSQL_"):
            monkeypatch.delenv(name)


def dsn_of(settings: Settings) -> str | None:
    return settings.dsn.get_secret_value() if settings.dsn is not None else None


def test_without_anything_the_embedded_server_of_this_directory_is_used() -> None:
    settings = Settings.load()
    assert settings.dsn is None
    assert settings.db_schema == DEFAULT_SCHEMA
    assert settings.home == Path(".eventsql")


def test_the_environment_comes_before_the_file_and_arguments_before_both(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("eventsql.toml").write_text("dsn = 'postgresql://file/x'\nschema = 'of_file'\nhome = 'of_file'\n")
    monkeypatch.setenv("EVENTSQL_DSN", "postgresql://environment/x")
    monkeypatch.setenv("EVENTSQL_SCHEMA", "of_environment")
    assert dsn_of(Settings.load()) == "postgresql://environment/x"
    assert Settings.load().db_schema == "of_environment"
    assert Settings.load().home == Path("of_file")
    assert Settings.load(db_schema="of_argument", dsn=None).db_schema == "of_argument"


def test_the_schema_of_the_file_is_called_schema() -> None:
    Path("eventsql.toml").write_text("schema = 'events'\n")
    assert Settings.load().db_schema == "events"


def test_variables_of_other_programs_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SCHEMA", "DB_SCHEMA", "DSN", "HOME"):
        monkeypatch.setenv(name, "theirs")
    settings = Settings.load()
    assert (settings.db_schema, settings.dsn, settings.home) == (DEFAULT_SCHEMA, None, Path(".eventsql"))


def test_a_secret_is_not_shown() -> None:
    settings = Settings.load(dsn="postgresql://someone:s3cret@host/db")
    assert "s3cret" not in repr(settings)
    assert "s3cret" not in str(settings)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("schema = 'Not An Identifier'", "schema: schema name 'Not An Identifier' is not usable"),
        ("schema = 7", "schema"),
        ("dsn = [['postgresql://someone:s3cret@host/db']]", "dsn"),
        ("dsn = 'postgresql://someone:s3cret@host/db'\npassword = 's3cret'", "password"),
        ("dsn = 'postgresql://someone:s3cret@host/db'\nschema = ", "eventsql.toml"),
        ("dns = 'postgresql://someone:s3cret@host/db'", "eventsql.toml has dns"),
        ("dsn = 'postgresql://someone:s3cret@host/db'\nkey 'x'", "eventsql.toml"),
    ],
)
def test_a_mistake_in_the_file_names_where_it_is_and_repeats_no_secret(text: str, named: str) -> None:
    Path("eventsql.toml").write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        Settings.load()
    assert named in caught.value.message
    assert "s3cret" not in caught.value.message
    assert "\n" not in caught.value.message


def test_a_file_that_is_no_text_is_a_mistake_too() -> None:
    Path("eventsql.toml").write_bytes(b"dsn = '\xff'")
    with pytest.raises(ConfigurationError, match=r"eventsql\.toml"):
        Settings.load()
