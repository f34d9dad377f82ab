"""A webserver of Dagster, asked by GraphQL."""

from __future__ import annotations

import ipaddress
import json
import re
from typing import Any, Final
from urllib.parse import urlsplit

import requests

from eventsql_orchestration.errors import LocalDagsterError, ValidationError

TIMEOUT: Final = 60.0
"""Seconds that an answer may take; a webserver asks the code location for some."""


class Webserver:
    """The webserver at a URL, `timeout` in seconds for each answer. `remedy` ends the message where none answers.

    A user and a password of the URL are sent, and shown to nobody: `url` is without them.
    """

    def __init__(self, url: str, *, timeout: float = TIMEOUT, remedy: str = "") -> None:
        """Raises `ValidationError` for what is no URL of HTTP."""
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ValidationError(
                f"{without_credentials(url)!r} is no URL of a Dagster webserver, such as http://127.0.0.1:3000"
            )
        self.url = without_credentials(url)
        self.endpoint = f"{url.rstrip('/')}/graphql"
        self.proxies = {"no_proxy": parts.hostname} if _is_loopback(parts.hostname) else None
        """For requests: the proxy that an environment names does not reach this machine's loopback."""
        self._timeout = timeout
        self._remedy = remedy

    def ask(self, query: str, **variables: Any) -> dict[str, Any]:
        """The data of an answer. Raises `LocalDagsterError` where none comes, or a refusal."""
        try:
            response = requests.post(
                self.endpoint, json={"query": query, "variables": variables},
                timeout=self._timeout, proxies=self.proxies,
            )  # fmt: skip
            response.raise_for_status()
            answer = response.json()
        except (requests.RequestException, ValueError) as error:
            # What `requests` says repeats the URL.
            raise LocalDagsterError(
                f"no Dagster answers at {self.url} ({type(error).__name__}){self._remedy}"
            ) from None
        if not isinstance(answer, dict):
            raise LocalDagsterError(f"what answers at {self.url} is no webserver of Dagster")
        data = answer.get("data")
        if answer.get("errors") or not isinstance(data, dict):
            raise LocalDagsterError(f"{self.url} refused a query: {one_line(json.dumps(answer.get('errors')))}")
        return data


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def without_credentials(url: str) -> str:
    """A webserver's URL as it may be shown: without a user and a password, and without a slash at its end."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl().rstrip("/")


def one_line(text: str) -> str:
    """The message of an error without what Dagster puts before it."""
    return re.sub(r"^dagster\.\S+: |^Failure: ", "", " ".join(text.split()))[:500]
