"""URLs of an orchestrator's webserver: showing them without secrets, and reaching them past a proxy."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from eventsql_orchestration.errors import ValidationError


def check_url(url: str, server: str, example: str) -> str:
    """Return a URL of HTTP. `server` names what it must lead to. Raises `ValidationError`."""
    # It repeats no part of the URL, which may be a part of a password.
    cut = ValidationError(
        f"the URL of {server} cannot be read: write it like {example}, with / ? # in a password as %2F %3F %23, and @ "
        "in a path as %40"
    )
    try:
        parts = urlsplit(url)
        # It raises for a port that is not a number.
        _ = parts.port
    except ValueError:
        raise cut from None
    # The end of a password with one of these characters, or a URL without http://.
    if "@" in parts._replace(netloc="").geturl():
        raise cut
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValidationError(f"{without_credentials(url)!r} is not the URL of {server}, for example {example}")
    return url


def without_credentials(url: str) -> str:
    """A webserver's URL as it may be shown: without user, password and a slash at its end."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl().rstrip("/")


def proxies_of(url: str) -> dict[str, str] | None:
    """The `proxies` for requests: none for a loopback host, which a proxy of the environment cannot reach."""
    host = urlsplit(url).hostname or ""
    return {"no_proxy": host} if _is_loopback(host) else None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
