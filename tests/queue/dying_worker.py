"""A process of the fault run: it sends numbered messages, or works on them, until it is killed or told to end."""

from __future__ import annotations

import os
import sys
import time

import psycopg

from eventsql_orchestration import EventSQL
from eventsql_orchestration.database import Connection
from eventsql_orchestration.errors import DatabaseError, EventSQLError
from eventsql_orchestration.queue import Message, NewMessage, Queue


def send(dsn: str, sender: str, messages: int) -> None:
    """Send messages in batches, and note the last number of each: a restart goes on after it.

    Every other batch is sent in the transaction that notes it, the others before, once by their deduplication ids.

    It goes on when the server is back.
    """
    with EventSQL(dsn, transfer=False) as platform:
        queue = Queue(platform, "faults")
        while True:
            try:
                if _send_next(queue, dsn, sender, messages):
                    return
            except (psycopg.OperationalError, DatabaseError):
                time.sleep(0.1)


def _send_next(queue: Queue, dsn: str, sender: str, messages: int) -> bool:
    """Send the next batch of a sender. Gives whether all of its messages were sent before."""
    with psycopg.connect(dsn) as connection:
        row = connection.execute("SELECT last FROM public.sent WHERE sender = %s FOR UPDATE", [sender]).fetchone()
        assert row is not None
        first = row[0] + 1
        if first > messages:
            return True
        last = min(messages, first + 4)
        alone = first // 5 % 2 == 0
        # Two sends, with keys in either order.
        numbers = list(range(first, last + 1))
        for part in (numbers[::2], numbers[1::2]):
            queue.send_all(
                [
                    NewMessage(
                        b"%s:%d" % (sender.encode(), n),
                        key=f"{sender}{n % 3}",
                        deduplication_id=f"{sender}:{n}" if alone else None,
                    )
                    for n in part
                ],
                connection=None if alone else connection,
            )
        connection.execute("UPDATE public.sent SET last = %s WHERE sender = %s", [last, sender])
    return False


def work(dsn: str, receipts: str) -> None:
    """Write each message into a table, with its order, in the transaction of its acknowledgement.

    The file `receipts` gets a line for each message that the worker begins to handle, whatever becomes of it.
    """
    written = os.open(receipts, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def handle(message: Message, connection: Connection) -> None:
        os.write(written, b"%d %d\n" % (message.id, message.receipt))
        connection.execute("INSERT INTO public.done (key, body) VALUES (%s, %s)", [message.key, message.body.decode()])
        time.sleep(0.002)

    with EventSQL(dsn, transfer=False) as platform:
        while True:
            try:
                with Queue(platform, "faults").work(handle, workers=2, max_messages=4, visibility_timeout=2.0):
                    sys.stdin.read()
                return
            except EventSQLError:
                time.sleep(0.1)


if __name__ == "__main__":
    if sys.argv[1] == "send":
        send(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        work(*sys.argv[2:4])
