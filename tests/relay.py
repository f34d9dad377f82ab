"""A relay between clients and a server, which takes the answer to a commit away from a client."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from eventsql_orchestration.database import Connection


class Relay:
    """Passes bytes between clients and a server on this machine. `port` is where clients connect to."""

    def __init__(self, server: int) -> None:
        self._server = server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._clients: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """End the connections of all clients, as a network does that fails. The server notices nothing."""
        clients, self._clients = self._clients, []
        for client in clients:
            with suppress(OSError):
                client.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._clients.append(client)
                server = socket.create_connection(("127.0.0.1", self._server))
                gone = threading.Event()
                threading.Thread(target=_ask, args=(client, server, gone), daemon=True).start()
                threading.Thread(target=_answer, args=(server, client, gone), daemon=True).start()


def _ask(client: socket.socket, server: socket.socket, gone: threading.Event) -> None:
    with suppress(OSError):
        while given := client.recv(65_536):
            server.sendall(given)
    # To close the server's socket here would tell the server at once, unless the other thread is reading from it.
    gone.set()


def _answer(server: socket.socket, client: socket.socket, gone: threading.Event) -> None:
    with suppress(OSError):
        while (given := server.recv(65_536)) and not gone.is_set():
            client.sendall(given)
    server.close()
    client.close()


@contextmanager
def relayed(server: int) -> Iterator[Relay]:
    """A relay to the server on this port."""
    relay = Relay(server)
    try:
        yield relay
    finally:
        relay.close()


@contextmanager
def held_commits(session: Connection, *tables: str) -> Iterator[None]:
    """Commits that write to these tables of the platform wait at their end until the block ends."""
    session.execute(
        "CREATE FUNCTION eventsql.wait() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN PERFORM pg_advisory_xact_lock_shared(1); RETURN NULL; END $$"
    )
    for table in tables:
        session.execute(
            f"CREATE CONSTRAINT TRIGGER waits AFTER INSERT ON eventsql.{table} "
            "DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION eventsql.wait()".encode()
        )
    session.execute("SELECT pg_advisory_lock(1)")
    try:
        yield
    finally:
        session.execute("SELECT pg_advisory_unlock(1)")
