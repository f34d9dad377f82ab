"""Configuration from the environment (`EVENTSQL_…`) and from `eventsql.toml`, the environment first."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pydantic
from pydantic import Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, TomlConfigSettingsSource

from eventsql_orchestration.errors import ConfigurationError
from eventsql_orchestration.model import check_schema_name
from eventsql_orchestration.validation import DEFAULT_SCHEMA, split_urls

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


SETTINGS_FILE: Final = "eventsql.toml"


class Settings(BaseSettings):
    """The settings of one installation."""

    model_config = SettingsConfigDict(
        env_prefix="EVENTSQL_",
        # By default, pydantic looks up aliases without the prefix: the variable `SCHEMA` would set the platform's
        # schema.
        env_prefix_target="all",
        toml_file=SETTINGS_FILE,
        extra="forbid",
        frozen=True,
        populate_by_name=True,
        # A wrong value may be a URL in the wrong place.
        hide_input_in_errors=True,
    )

    dsn: SecretStr | None = Field(
        default=None,
        description="The URL of the database, or the URLs of all shards: a list in the file, with spaces or line ends "
        "between them in the environment. Without a URL, the embedded server of `home` is used.",
    )
    db_schema: str = Field(
        default=DEFAULT_SCHEMA, validation_alias="schema", description="The schema that has the platform's tables."
    )
    home: Path = Field(
        default=Path(".eventsql"),
        description="The directory of the embedded server, the start script of Java, and Dagster's instance.",
    )

    @field_validator("dsn", mode="before")
    @classmethod
    def _urls_in_one_text(cls, value: object) -> object:
        if isinstance(value, list | tuple) and all(isinstance(each, str) for each in value):
            return " ".join(value) or None
        return value

    @property
    def dsns(self) -> tuple[str, ...]:
        """The URL of each shard, or the URL of the only database; empty if no database is named."""
        return () if self.dsn is None else split_urls(self.dsn.get_secret_value())

    @field_validator("db_schema")
    @classmethod
    def _schema_is_an_identifier(cls, value: str) -> str:
        return check_schema_name(value)

    @field_validator("home", mode="before")
    @classmethod
    def _home_is_named(cls, value: object) -> object:
        if not str(value).strip():
            raise ValueError("it is empty: name a directory, or leave it out")
        return value

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - the signature is pydantic's
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - the signature is pydantic's
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings, env_settings, TomlConfigSettingsSource(settings_cls))

    @classmethod
    def load(cls, **overrides: Any) -> Settings:
        """Read the settings; `overrides` that are None count as not given.

        Raises `ConfigurationError` that names the setting and never repeats a secret value.
        """
        try:
            return cls(**{name: value for name, value in overrides.items() if value is not None})
        except pydantic.ValidationError as error:
            faults = "; ".join(map(_fault, error.errors()))
            raise ConfigurationError(f"settings cannot be used: {faults}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
            raise ConfigurationError(f"{SETTINGS_FILE} cannot be read: {error}") from None


def _fault(error: ErrorDetails) -> str:
    """One fault, without the value, which may be a secret."""
    name = ".".join(map(str, error["loc"]))
    if error["type"] != "extra_forbidden":
        return f"{name}: {error['msg'].removeprefix('Value error, ')}"
    known = ", ".join(str(field.validation_alias or known) for known, field in Settings.model_fields.items())
    return f"{SETTINGS_FILE} has {name}, which is not a setting (settings are {known})"
