"""What texts and errors show of database URLs."""

from __future__ import annotations

import pytest

from eventsql_orchestration.redaction import hide, hide_passwords, hiding, is_plain_host

URL = "postgresql://app:p%20w@db/orders"


@pytest.mark.parametrize(
    ("name", "plain"),
    [("db.example.com", True), ("one,two", True), ("/run/postgresql", True), ("[::1]", True), ("fe80::1%eth0", True),
     ("u:secret@h", False), ("password=secret", False)],
)  # fmt: skip
def test_a_host_is_shown_if_it_is_a_name_or_an_address(name: str, plain: bool) -> None:
    assert is_plain_host(name) == plain


@pytest.mark.parametrize(
    ("url", "text", "shown"),
    [
        (URL, "p w and p%20w for app on db", "*** and *** for app on db"),
        (f"\n{URL}", "p w", "***"),
        # A short password is a part of many words.
        ("postgresql://u:a@db", "a table and data", "*** table and data"),
        ("postgresql://u:%3Fa@db/x", "what?a or ?a", "what*** or ***"),
        ("postgresql://u:a%3F@db/x", "a?what or a?", "***what or ***"),
        # The longer secret first: the shorter one would leave a part of it.
        ("postgresql://u:p@db/x?password=p-long&password=p-long-er", "p-long-er p-long p", "*** *** ***"),
        ("postgresql://u@db/x?password=", "text", "text"),
        ("postgresql://app:app@db/app", 'user "app" of app', 'user "app" of app'),
        ("postgresql://db:5432/orders", "db, 5432, orders", "db, 5432, orders"),
        ("postgresql://u:1/secret@db/x", 'port "1/secret"', 'port "***"'),
        ("postgresql://u%3Asecret@db/x", "u:secret, secret, u%3Asecret", "***, ***, ***"),
        ("postgresql://abc%3Adef0@db/x", "def0", "***"),
        ("postgresql://u@db/password%3Dsecret", "secret", "***"),
        ("postgresql://u@h:secret@db/x", "secret", "***"),
        ("postgresql://u@db/x?oauth_client_secret=secret", "secret", "***"),
        # Names of places stay, though a connection gets them as options.
        ("postgresql://u@/x?host=one,two&hostaddr=::1", '"one" "two" "::1"', '"one" "two" "::1"'),
        ("postgresql://u@/x?host=u:secret@h", "u:secret@h", "***"),
        ("postgresql://u@db/x?hostaddr=secret", "secret", "***"),
        ("postgresql://u@db/x?service=/etc/db/ca.pem", '"etc" "db"', '"***" "db"'),
        # So do paths: a word in the place of a path may be the end of a password.
        ("postgresql://u@db/x?sslrootcert=/ca.pem&sslkey=%2Fkey", '"/ca.pem" "/key"', '"/ca.pem" "/key"'),
        ("postgresql://u@db/x?sslrootcert=secret", 'file "secret"', 'file "***"'),
        ("postgresql://u@db/x?sslkey=/pkcs11:pin%3Dsecret", 'file "/pkcs11:pin=secret"', 'file "***"'),
        ("postgresql://u@[::1]:6432/x?direct=[::1]:5432", '"::1"', '"::1"'),
        ("postgresql://u@db/x?options=-ca.b%3Dsecret", "-ca.b is not secret", "*** is not ***"),
        # libpq repeats other values in quotes, whole or in part.
        ("postgresql://u@db/x?require_auth=one,two", "value \"two\" of 'one,two', one", "value \"***\" of '***', one"),
        ("postgresql://u@db/x?service=secret", '"secr" "other"', '"***" "other"'),
        ("postgresql://u@db/x?service=sec%20ret", '"sec%20ret" "sec ret"', '"***" "***"'),
        ("host=db user=u password='p w'", "p w: \"db user\" 'other'", "***: \"***\" 'other'"),
    ],
)  # fmt: skip
def test_the_error_of_a_connection_shows_names_and_no_secret(url: str, text: str, shown: str) -> None:
    assert hide(text, url) == shown


@pytest.mark.parametrize(
    ("url", "text", "shown"),
    [
        (URL, f"give {URL}, not 'p w'", "give postgresql://***, not '***'"),
        ("postgresql://db/x", "give postgresql://db/x", "give postgresql://db/x"),
        # An option may be a secret only where it is repeated with its URL.
        ("postgresql://db/x?service=app", "postgresql://db/x?service=app: app", "postgresql://***: app"),
        ("host=db password=secret", "host=db password=secret: secret", "***: ***"),
        ("postgresql://u:'\\@db/x", repr("postgresql://u:'\\@db/x"), '"postgresql://***"'),
        ("", "text", "text"),
    ],
)
def test_a_text_shows_no_url_with_more_than_names(url: str, text: str, shown: str) -> None:
    assert hide_passwords(text, url) == shown


def test_an_error_its_cause_and_its_context_show_no_secret() -> None:
    def fail() -> None:
        try:
            try:
                raise ValueError("p w", 7)
            finally:
                raise KeyError("p w")
        except KeyError as error:
            raise OSError("p w") from error

    with pytest.raises(OSError, match=r"^\*\*\*$") as caught, hiding(URL):
        fail()
    cause = caught.value.__cause__
    assert cause is not None
    assert cause.args == ("***",)
    assert cause.__context__ is not None
    assert cause.__context__.args == ("***", 7)
