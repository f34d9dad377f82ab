"""Messages between the launcher and its fork server: one JSON object a line, over a pair of sockets."""

from __future__ import annotations

import json
import socket
from typing import Any


class ChannelClosedError(Exception):
    """The other process has ended or closed its end."""


class Channel:
    """One end of the pair."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self._buffer = b""

    def send(self, **message: Any) -> None:
        """Raises `ChannelClosedError`."""
        try:
            self.socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise ChannelClosedError from error

    def receive(self, *, timeout: float | None = None) -> dict[str, Any]:
        """The next message. Raises `ChannelClosedError`, and `TimeoutError` if none comes for `timeout` seconds."""
        self.socket.settimeout(timeout)
        while b"\n" not in self._buffer:
            try:
                part = self.socket.recv(65536)
            except TimeoutError:
                raise
            except OSError as error:
                raise ChannelClosedError from error
            if not part:
                raise ChannelClosedError
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def close(self) -> None:
        """Close this end. The other end then reads `ChannelClosedError`."""
        self.socket.close()
