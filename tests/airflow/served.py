"""A server of Airflow's REST API for tests."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException

from tests.airflow.conftest import context_of


class FakeAirflow:
    """A server with the part of the REST API that is asked for. It executes each run at once by a function."""

    def __init__(self, execute: Callable[[Any], object] = lambda _: None) -> None:
        """`execute` gets the context of a task."""
        self.execute = execute
        self.dags: dict[str, dict[str, Any]] = {"billing": {"is_paused": False}}
        self.assets: list[dict[str, Any]] = []
        self.runs: list[dict[str, Any]] = []
        self.scheduler = "healthy"
        self.login: dict[str, str] | None = None
        self.tokens = 0
        self.lost = 0
        """The number of the next answers that a proxy loses."""
        self.asked: list[str] = []

    def answer(self, method: str, url: str, token: str | None, body: Any) -> tuple[int, Any]:
        parts = urlsplit(url)
        path, query = unquote(parts.path), parse_qs(parts.query)
        if path == "/auth/token":
            if (method, body) != (("GET", None) if self.login is None else ("POST", self.login)):
                return 401, {"detail": "who are you"}
            self.tokens += 1
            return 201, {"access_token": f"token-{self.tokens}"}
        if token != f"Bearer token-{self.tokens}":
            return 401, {"detail": "the token has ended"}
        self.asked.append(f"{method} {path}")
        answer = self._answer(method, path.removeprefix("/api/v2"), query, body)
        if self.lost:
            self.lost -= 1
            return 502, {"detail": "bad gateway"}
        return answer

    def _answer(self, method: str, path: str, query: dict[str, list[str]], body: Any) -> tuple[int, Any]:
        match = re.fullmatch(r"/dags/([^/]+)(/dagRuns(/(.+))?)?", path)
        if method == "POST":
            return self._run(body) if match is not None and match[1] in self.dags else (404, {"detail": "no DAG"})
        found: Any = None
        if path == "/assets":
            found = page("assets", self.assets, query)
        elif match is None:
            found = {"/monitor/health": {"scheduler": {"status": self.scheduler}}, "/version": {"version": "3"}}.get(
                path
            )
        elif match[2] is None:
            found = self.dags.get(match[1])
        elif match[4] is not None:
            found = next((run for run in self.runs if run["dag_run_id"] == match[4]), None)
        else:
            states = query.get("state", [])
            found = page("dag_runs", [run for run in self.runs if not states or run["state"] in states], query)
        return (404, {"detail": "not found"}) if found is None else (200, found)

    def _run(self, body: Any) -> tuple[int, Any]:
        if not re.fullmatch(r"[A-Za-z0-9_.~:+-]+", body["dag_run_id"]):
            return 400, {"detail": "run id"}
        if any(run["dag_run_id"] == body["dag_run_id"] for run in self.runs):
            return 409, {"detail": "it exists"}
        run = {"dag_run_id": body["dag_run_id"], "conf": body["conf"], "state": "success"}
        try:
            self.execute(context_of(run_id=body["dag_run_id"], conf=body["conf"]))
        except AirflowSkipException:
            pass
        except AirflowFailException:
            run["state"] = "failed"
        self.runs.append(run)
        return 200, run


def page(field: str, items: list[Any], query: dict[str, list[str]]) -> dict[str, Any]:
    """A page of a list of at most two items, whatever the limit."""
    first = int(query["offset"][0])
    return {field: items[first : first + 2], "total_entries": len(items)}


@contextmanager
def serving(fake: FakeAirflow) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            status, said = fake.answer(self.command, self.path, self.headers.get("Authorization"), body)
            data = json.dumps(said).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_POST = do_GET  # noqa: N815 - the name is the server's

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
