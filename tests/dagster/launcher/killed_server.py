"""A fork server that dies, or whose child dies, at the window which the environment variable KILLED names."""

from __future__ import annotations

import os
import signal
from typing import Any

from eventsql_orchestration.dagster.launcher import server
from eventsql_orchestration.dagster.launcher.channel import Channel

send = Channel.send


def killing_send(channel: Channel, **message: Any) -> None:
    """Die, or let the new process die, around the answer that tells the launcher of the new process."""
    if "pid" not in message:
        send(channel, **message)
        return
    if os.environ["KILLED"] == "the child":
        os.kill(message["pid"], signal.SIGKILL)
        os.waitid(os.P_PID, message["pid"], os.WEXITED | os.WNOWAIT)
        send(channel, **message)
        return
    if os.environ["KILLED"] == "after the answer":
        send(channel, **message)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    Channel.send = killing_send  # type: ignore[method-assign,assignment]
    server.main()
