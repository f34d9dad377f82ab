"""The part of Airflow's public REST API that this package uses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, unquote, urlencode, urlsplit

import requests

from eventsql_orchestration.errors import EventSQLError
from eventsql_orchestration.orchestration.errors import AirflowAnswerError, LocalAirflowError
from eventsql_orchestration.orchestration.webservers import check_url, proxies_of, without_credentials

PAGE: Final = 100
"""Objects that the API gives at once, at most."""

TIMEOUT: Final = 60.0
"""Seconds that an answer may take. While the API server imports modules for the first task, it answers nothing: for
over 30 s on a busy machine."""

URL_FILE: Final = "airflow.url"
"""The file in the directory of `eventsql dev --dags` with the URL of its Airflow."""

UNAUTHORIZED: Final = 401
NOT_FOUND: Final = 404
CONFLICT: Final = 409
SERVER_ERROR: Final = 500
"""The least status of HTTP for errors of a server."""


class AirflowApi:
    """The API of the Airflow at a URL. Its user and password get the tokens; `url` is without them.

    Without a user, Airflow has to let everybody in, as the Airflow of `eventsql dev` does.
    """

    def __init__(self, url: str) -> None:
        """Raises `ValidationError` for a URL that is not of HTTP."""
        parts = urlsplit(check_url(url, "an Airflow", "http://127.0.0.1:8080"))
        self.url = without_credentials(url)
        self._proxies = proxies_of(url)
        self._login: dict[str, str] | None = None
        if parts.username:
            self._login = {"username": unquote(parts.username), "password": unquote(parts.password or "")}
        self._token: str | None = None

    def ask(self, method: str, path: str, **body: Any) -> Any:
        """Ask the API, for example `ask("GET", "/dags")`; gives the answer's JSON.

        Raises `AirflowAnswerError` for a refusal, and `LocalAirflowError` if no answer comes or the server fails.
        """
        known = self._token is not None
        answer = self._send(method, path, body)
        if answer.status_code == UNAUTHORIZED and known:
            # The token has ended, or Airflow was started again.
            self._token = None
            answer = self._send(method, path, body)
        if not answer.ok:
            raise AirflowAnswerError(
                f"Airflow at {self.url} refused {method} {path}: {answer.status_code} {answer.text[:500]}",
                status=answer.status_code,
            )
        return self._json(answer) if answer.content else None

    def _send(self, method: str, path: str, body: Mapping[str, Any]) -> requests.Response:
        if self._token is None:
            self._token = self._new_token()
        return self._request(method, f"/api/v2{path}", json=body or None, auth=self._authorize)

    def _authorize(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        # Set the header by `auth`: a header alone would give way to a password in ~/.netrc.
        request.headers["Authorization"] = f"Bearer {self._token}"
        return request

    def _new_token(self) -> str:
        answer = self._request("GET" if self._login is None else "POST", "/auth/token", json=self._login)
        if not answer.ok:
            remedy = "give its URL with a user and a password" if self._login is None else "check user and password"
            raise AirflowAnswerError(
                f"Airflow at {self.url} gives no token ({answer.status_code}): {remedy}", status=answer.status_code
            )
        token = self._json(answer)
        if not isinstance(token, dict) or "access_token" not in token:
            raise LocalAirflowError(f"the server at {self.url} is not an Airflow 3: correct its URL")
        return str(token["access_token"])

    def _request(self, method: str, path: str, **options: Any) -> requests.Response:
        try:
            answer = requests.request(
                method, f"{self.url}{path}", timeout=TIMEOUT, proxies=self._proxies, **options
            )  # fmt: skip
        except requests.RequestException as error:
            raise LocalAirflowError(
                f"no Airflow answers at {self.url} ({type(error).__name__}): start it, or give its URL"
            ) from error
        if answer.status_code >= SERVER_ERROR:
            # A proxy answers so while Airflow is away.
            raise LocalAirflowError(
                f"Airflow at {self.url} failed at {method} {path}: {answer.status_code} {answer.text[:500]}"
            )
        return answer

    def _json(self, answer: requests.Response) -> Any:
        try:
            return answer.json()
        except ValueError:
            raise LocalAirflowError(f"the server at {self.url} is not an Airflow 3: correct its URL") from None

    def pages(self, path: str, field: str, **query: Any) -> Iterator[dict[str, Any]]:
        """All objects of a list: those in `field` of each page. Raises as `ask`."""
        offset = 0
        while True:
            page = self.ask("GET", f"{path}?{urlencode({**query, 'limit': PAGE, 'offset': offset}, doseq=True)}")
            yield from page[field]
            offset += len(page[field])
            if not page[field] or offset >= page["total_entries"]:
                return

    def trigger(
        self, dag_id: str, conf: Mapping[str, Any] | None = None, *, run_id: str | None = None, note: str | None = None
    ) -> str:
        """Start a run of a DAG; gives its id. Raises as `ask`."""
        run = self.ask(
            "POST", f"/dags/{dag_id}/dagRuns",
            logical_date=None, conf=dict(conf or {}), dag_run_id=run_id, note=note,
        )  # fmt: skip
        return str(run["dag_run_id"])

    def find_dag(self, dag_id: str) -> Any | None:
        """A DAG; None if there is no such DAG. Raises as `ask`."""
        return self._find(f"/dags/{quote(dag_id, safe='')}")

    def find_run(self, dag_id: str, run_id: str) -> Any | None:
        """A run; None if there is no such run. Raises as `ask`."""
        return self._find(f"/dags/{quote(dag_id, safe='')}/dagRuns/{quote(run_id, safe='')}")

    def _find(self, path: str) -> Any | None:
        try:
            return self.ask("GET", path)
        except AirflowAnswerError as error:
            if error.status == NOT_FOUND:
                return None
            raise

    def state(self, dag_id: str, run_id: str) -> str:
        """The state of a run: queued, running, success, failed, or deleted. Raises as `ask`."""
        run = self.find_run(dag_id, run_id)
        return "deleted" if run is None else str(run["state"])


def running_airflow(directory: Path) -> str | None:
    """The URL of the Airflow that `eventsql dev --dags` runs in a directory; None if none answers."""
    try:
        url = (directory / URL_FILE).read_text(encoding="utf-8")
        AirflowApi(url).ask("GET", "/version")
    except (OSError, EventSQLError):
        # A killed process may have left an empty file.
        return None
    return url
