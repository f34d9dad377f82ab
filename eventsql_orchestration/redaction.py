"""The secrets of database URLs, and texts without them.

libpq and its drivers repeat parts of a URL in their errors: an option whose value they do not understand, a part that
they take for a host. Spark's tasks import this module, so it needs nothing that loads slowly.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Final
from urllib.parse import parse_qsl, unquote

HIDDEN: Final = "***"

_URL: Final = re.compile(
    r"[\w+]+://(?:(?P<user>[^:/]*)(?::(?P<password>[^@]*))?@)?"
    r"(?P<host>\[[^/?]+\]|[^/:?]*)(?::[^/?]*)?(?:/(?P<database>[^?]*))?(?:\?(?P<options>.*))?",
    re.DOTALL,
)
"""The parts of a URL as SQLAlchemy reads them."""

_PLACES: Final = frozenset({"host", "hostaddr", "port", "user", "dbname"})
"""Options that say where to connect, as the parts before the options do."""

_PASSWORDS: Final = frozenset(
    {"password", "sslpassword", "oauth_client_secret", "scram_client_key", "scram_server_key"}
)

_FILES: Final = frozenset({"passfile", "sslcert", "sslcrl", "sslcrldir", "sslkey", "sslrootcert"})
"""Options that name a file or a directory. A path stays, because an error of TLS says nothing without it."""

_PATH: Final = re.compile(r"/[\w./\-@ ]*")

_PLAIN: Final = re.compile(r"[\w.,/\-@ ]*")
"""Names of users, databases and hosts. A name with a colon or an equals sign may hold a password by mistake."""

_ADDRESS: Final = re.compile(r"\[?[0-9a-fA-F:.]+(%\w+)?\]?")

_KEY_AND_PASSWORD: Final = re.compile(r"password\s*=\s*('(?:[^'\\]|\\.)*'|\S+)", re.IGNORECASE)

_QUOTED: Final = re.compile(r"""(["'])(.+?)\1""")


def is_plain(name: str) -> bool:
    """Whether a user or database of a URL may be shown: it looks like a name, and like nothing else."""
    return _PLAIN.fullmatch(name) is not None


def is_plain_host(name: str) -> bool:
    """Whether a host may be shown: a name, several with commas between them, or an address."""
    return is_plain(name) or _ADDRESS.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class UrlSecrets:
    """The secrets of one database URL.

    `passwords` are hidden everywhere. The error of a failed connection may repeat more: `words` of the option `options`
    as they are, and `values` of all options, or parts of them, in quotes. `names` are hosts, users, databases and
    files, and stay.
    """

    passwords: tuple[str, ...]
    words: tuple[str, ...]
    values: tuple[str, ...]
    names: frozenset[str]

    def hide_passwords(self, text: str) -> str:
        """Any text without the passwords."""
        for password in self.passwords:
            text = _hide_word(password, text)
        return text

    def hide(self, text: str) -> str:
        """The text of a connection's error without the secrets."""
        text = self.hide_passwords(text)
        for word in self.words:
            text = _hide_word(word, text)
        for value in self.values:
            for quote in "\"'":
                text = text.replace(f"{quote}{value}{quote}", f"{quote}{HIDDEN}{quote}")
        return _QUOTED.sub(self._hide_quoted, text)

    def _hide_quoted(self, found: re.Match[str]) -> str:
        piece = found[2]
        secret = piece not in self.names and any(piece in value for value in (*self.values, *self.passwords))
        return f"{found[1]}{HIDDEN}{found[1]}" if secret else found[0]


@lru_cache(maxsize=64)
def secrets_of(url: str) -> UrlSecrets:
    """The secrets of a URL, or of a connection string in the place of a URL."""
    found = _URL.fullmatch(url.strip())
    if found is None:
        keys = _KEY_AND_PASSWORD.findall(url)
        return UrlSecrets(_hidden((each.strip("'") for each in keys), frozenset()), (), (url,), frozenset())
    names, passwords, words, values = set[str](), list[str](), list[str](), list[str]()
    for name in (found["user"] or "", found["host"], found["database"] or ""):
        plain = is_plain_host(name) if name == found["host"] else is_plain(unquote(name))
        if plain:
            names |= {unquote(name), name.strip("[]"), *name.split(",")}
        else:
            passwords += [name, unquote(name), *re.split(r"[:@=/]", unquote(name))[1:]]
    if found["password"]:
        passwords += [found["password"], unquote(found["password"])]
    options = found["options"] or ""
    for option, value in parse_qsl(options, keep_blank_values=True):
        shown_as = _ADDRESS.fullmatch if option == "hostaddr" else is_plain_host
        if option in _PLACES and shown_as(value):
            names |= {value, *value.split(",")}
        elif option in _FILES and _PATH.fullmatch(value):
            names.add(value)
        elif option in _PASSWORDS or option in _PLACES:
            passwords.append(value)
        elif option == "options":
            # Words of it are repeated without quotes.
            words += [word for word in re.split(r"[\s=]+", value) if len(word) > len("-c")]
        # libpq quotes single elements of a list.
        values += [value, *value.split(",")]
    values += [pair.partition("=")[2] for pair in options.split("&")]
    shown = frozenset(names)
    return UrlSecrets(_hidden(passwords, shown), _hidden(words, shown), _hidden(values, shown), shown)


def _hidden(texts: Iterable[str], shown: frozenset[str]) -> tuple[str, ...]:
    """Hide the longest first: a shorter secret may be a part of it."""
    return tuple(sorted({text for text in texts if text and text not in shown}, key=len, reverse=True))


def _hide_word(word: str, text: str) -> str:
    """Hide a word where it stands by itself: a short password may be a part of any word."""
    before = r"(?<!\w)" if re.match(r"\w", word) else ""
    after = r"(?!\w)" if re.search(r"\w\Z", word) else ""
    return re.sub(f"{before}{re.escape(word)}{after}", HIDDEN, text)


def hide(text: str, *urls: str) -> str:
    """The text of a connection's error without the secrets of these URLs."""
    for url in urls:
        text = secrets_of(url).hide(text)
    return text


def hide_passwords(text: str, *urls: str) -> str:
    """Any text without the passwords of these URLs, and without the URLs that hold more than names."""
    for url in filter(None, urls):
        secrets = secrets_of(url)
        if secrets.passwords or secrets.values:
            for form in (url, repr(url)[1:-1]):
                text = text.replace(form, f"{url.partition('://')[0]}://{HIDDEN}" if "://" in url else HIDDEN)
        text = secrets.hide_passwords(text)
    return text


@contextmanager
def hiding(*urls: str) -> Iterator[None]:
    """Remove the secrets of these URLs from the errors of the block and from their causes."""
    try:
        yield
    except Exception as error:
        for each in _chain(error):
            each.args = tuple(hide(part, *urls) if isinstance(part, str) else part for part in each.args)
        raise


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen = set[int]()
    waiting = [error]
    while waiting:
        each = waiting.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            yield each
            waiting += [each.__cause__, each.__context__]
