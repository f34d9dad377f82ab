"""A server that takes no connection without TLS: the URL's TLS options reach it on every way to the database."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import uuid
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import quote

import psycopg
import psycopg2.extensions
import pytest
import sqlalchemy

from eventsql_orchestration import EventSQL, Publication, Topic
from eventsql_orchestration.dagster import EventSQLResource
from eventsql_orchestration.dagster.local.instance import storage_url
from eventsql_orchestration.database import Database
from eventsql_orchestration.database.embedded import EmbeddedPostgres, programs
from eventsql_orchestration.database.notifications import LOG, Listener
from eventsql_orchestration.errors import DatabaseUnavailableError
from eventsql_orchestration.spark.adbc import CopyConnection
from eventsql_orchestration.spark.options import Source
from eventsql_orchestration.spark.staging import WriteTarget, _Staging
from tests.conftest import own_server
from tests.fixtures import Until
from tests.waiting import PATIENCE, wait_until

CLIENT = "certified"
"""A role that shows a certificate instead of a password."""

HBA = f"""
hostssl all {CLIENT} 127.0.0.1/32 cert
hostssl all all 127.0.0.1/32 scram-sha-256
"""


@dataclass(frozen=True)
class Tls:
    """A server with TLS, and files in `files`: ca.crt, other.crt of another authority, client.crt and client.key."""

    place: str
    password: str
    files: Path
    version: int

    def url(self, options: str, *, user: str | None = None, host: str = "127.0.0.1") -> str:
        account = f"eventsql:{self.password}" if user is None else user
        port_and_database = self.place.partition(":")[2]
        return f"postgresql://{account}@{host}:{port_and_database}?{options}"

    @property
    def verified(self) -> str:
        return f"sslmode=verify-full&sslrootcert={quote(str(self.files / 'ca.crt'), safe='')}&channel_binding=require"


def openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


def authority(directory: Path, name: str) -> None:
    openssl(
        *("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}"),
        *("-keyout", directory / f"{name}.key", "-out", directory / f"{name}.crt"),
    )


def certificate(directory: Path, name: str, *, subject: str, extension: str) -> None:
    """A certificate of the authority `ca`."""
    openssl(
        *("req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={subject}"),
        *("-keyout", directory / f"{name}.key", "-out", directory / f"{name}.csr"),
    )
    (directory / f"{name}.ext").write_text(extension)
    openssl(
        *("x509", "-req", "-days", "2", "-in", directory / f"{name}.csr", "-out", directory / f"{name}.crt"),
        *("-CA", directory / "ca.crt", "-CAkey", directory / "ca.key", "-CAcreateserial"),
        *("-extfile", directory / f"{name}.ext"),
    )


def candidates() -> list[Path]:
    """PostgreSQL's programs that may be built with TLS: the package's are not."""
    named = os.environ.get(programs.PROGRAMS_VARIABLE)
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), reverse=True)
    return ([Path(named)] if named else []) + [path.parent for path in installed]


def can_tls(connection: psycopg.Connection) -> bool:
    try:
        connection.execute("ALTER SYSTEM SET ssl TO on")
    except psycopg.Error:
        return False
    return True


def demand_tls(embedded: EmbeddedPostgres, files: Path) -> Tls | None:
    """Have a started server take connections with TLS alone; None where it is built without."""
    running = embedded.start()
    with psycopg.connect(running.dsn, autocommit=True) as connection:
        if not can_tls(connection):
            return None
        owner = running.data_directory.stat()
        for source, name in (("server.crt", "server.crt"), ("server.key", "server.key"), ("ca.crt", "ca.crt")):
            copied = running.data_directory / name
            shutil.copy(files / source, copied)
            copied.chmod(0o600)
            os.chown(copied, owner.st_uid, owner.st_gid)
        connection.execute("ALTER SYSTEM SET ssl_ca_file TO 'ca.crt'")
        connection.execute(f"CREATE ROLE {CLIENT} LOGIN SUPERUSER".encode())
        (running.data_directory / "pg_hba.conf").write_text(HBA)
        connection.execute("SELECT pg_reload_conf()")
        version = connection.info.server_version // 10_000
    return Tls(f"127.0.0.1:{running.port}/eventsql", running.password, files, version)


def demanded(tls: Tls) -> bool:
    """Whether the server has read its files, which it does in its own time."""
    try:
        psycopg.connect(tls.url("sslmode=disable")).close()
    except psycopg.OperationalError:
        pass
    else:
        return False
    try:
        psycopg.connect(tls.url(tls.verified)).close()
    except psycopg.OperationalError:
        return False
    return True


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tls]:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl is installed here, which makes the certificates")
    files = tmp_path_factory.mktemp("certificates")
    authority(files, "ca")
    authority(files, "other")
    certificate(files, "server", subject="server", extension="subjectAltName=IP:127.0.0.1\n")
    certificate(files, "client", subject=CLIENT, extension="extendedKeyUsage=clientAuth\n")
    for directory in candidates():
        with pytest.MonkeyPatch.context() as patched, own_server() as embedded:
            patched.setenv(programs.PROGRAMS_VARIABLE, str(directory))
            found = demand_tls(embedded, files)
            if found is not None:
                wait_until(partial(demanded, found))
                yield found
                return
    pytest.skip("no PostgreSQL with TLS is installed here: `make tls` installs it where it can")


def encrypted(database: Database) -> set[bool]:
    """Whether each of the sessions in the database is encrypted."""
    with database.connection() as connection:
        rows = connection.execute(
            "SELECT ssl FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) WHERE datname = current_database()"
        ).fetchall()
    return {ssl for (ssl,) in rows}


def test_every_connection_of_the_platform_is_encrypted_and_its_server_verified(tls: Tls, until: Until) -> None:
    with EventSQL(tls.url(tls.verified)) as platform:
        platform.registry.register_topic(Topic("orders"))
        platform.publisher.publish(Publication("orders", b"1"))
        listener, heard = Listener(platform.database), threading.Event()
        listener.subscribe(LOG, None, heard.set)
        # The event's own notification may come first.
        until(lambda: listener.listening)
        assert heard.wait(PATIENCE)
        with closing(platform.database.dedicated()):
            assert encrypted(platform.database) == {True}
        listener.close()


def test_a_connection_without_tls_is_refused(tls: Tls) -> None:
    with Database(tls.url("sslmode=disable")) as database, pytest.raises(DatabaseUnavailableError):
        database.ensure_schema()


def test_a_server_of_another_authority_is_refused(tls: Tls) -> None:
    options = f"sslmode=verify-full&sslrootcert={quote(str(tls.files / 'other.crt'), safe='')}"
    with Database(tls.url(options)) as database:
        for use in (database.ensure_schema, database.dedicated):
            with pytest.raises(DatabaseUnavailableError):
                use()


def test_a_server_of_another_name_is_refused(tls: Tls) -> None:
    with (
        Database(tls.url(tls.verified, host="localhost")) as database,
        pytest.raises(DatabaseUnavailableError, match="server certificate"),
    ):
        database.ensure_schema()
    with Database(tls.url(tls.verified.replace("verify-full", "verify-ca"), host="localhost")) as database:
        database.ensure_schema()


def test_a_certificate_stands_for_a_password(tls: Tls) -> None:
    key, shown = tls.files / "client.key", quote(str(tls.files / "client.crt"), safe="")
    key.chmod(0o600)
    # No password is sent, so that none binds the channel.
    options = tls.verified.replace("&channel_binding=require", "")
    url = tls.url(f"{options}&sslcert={shown}&sslkey={quote(str(key), safe='')}", user=CLIENT)
    with Database(url) as database:
        database.ensure_schema()
        database.dedicated().close()
        with CopyConnection(database.dsn) as connection:
            assert sum(batch.num_rows for batch in connection.batches("SELECT 1")) == 1
    with Database(tls.url(options, user=CLIENT)) as without, pytest.raises(DatabaseUnavailableError):
        without.ensure_schema()


def test_the_way_past_a_pooler_takes_the_same_options(tls: Tls) -> None:
    place = tls.place.partition("/")[0]
    with Database(tls.url(f"{tls.verified}&direct={place}")) as database, closing(database.dedicated()):
        assert encrypted(database) == {True}


def test_sparks_tasks_read_and_write_with_them(tls: Tls) -> None:
    source = Source.of([tls.url(tls.verified)], "eventsql")
    with Database(tls.url(tls.verified)) as database:
        database.ensure_schema()
        # Never read where nothing is staged.
        staging = _Staging(WriteTarget(source, None), uuid.uuid4())  # type: ignore[arg-type]
        with closing(staging), CopyConnection(source.dsn) as connection:
            query = "SELECT 1 FROM pg_stat_ssl WHERE pid = pg_backend_pid() AND ssl"
            assert sum(batch.num_rows for batch in connection.batches(query)) == 1
            assert encrypted(database) == {True}


def test_dagsters_resource_and_storage_take_them(tls: Tls) -> None:
    with Database(tls.url(tls.verified)) as database:
        database.ensure_schema()
    resource = EventSQLResource(dsn=tls.url(tls.verified))
    with resource.bounded(10) as platform:
        assert platform.registry.topics() is not None
        assert encrypted(platform.database) == {True}
    resource.platform.registry.topics()
    assert encrypted(resource.platform.database) == {True}
    resource.platform.close()
    engine = sqlalchemy.create_engine(storage_url(tls.url(tls.verified)))
    with engine.connect() as connection:
        assert isinstance(connection.connection.driver_connection, psycopg2.extensions.connection)
        ssl = connection.exec_driver_sql("SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()").scalar_one()
    engine.dispose()
    assert ssl is True


def test_tls_begins_at_once_where_the_server_can(tls: Tls) -> None:
    with Database(tls.url(f"{tls.verified}&sslnegotiation=direct")) as database:
        if tls.version >= 17:
            database.ensure_schema()
            assert encrypted(database) == {True}
        else:
            with pytest.raises(DatabaseUnavailableError):
                database.ensure_schema()
