"""Terminals of programs under test."""

from __future__ import annotations

import os
import pty
import struct
import threading
from contextlib import suppress
from fcntl import ioctl
from termios import TIOCSWINSZ

from tests.waiting import PATIENCE


class Terminal:
    """A terminal that is read at all times: a program waits for a terminal that nobody reads."""

    def __init__(self) -> None:
        self._ours, self.descriptor = pty.openpty()
        """The end of the programs, for their standard streams."""
        ioctl(self.descriptor, TIOCSWINSZ, struct.pack("HHHH", 30, 120, 0, 0))
        self._shown = b""
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    @property
    def shown(self) -> bytes:
        """Everything that programs have written so far."""
        return self._shown

    def close(self) -> bytes:
        """Close the terminal of programs that have ended, once or again; gives everything that they wrote."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
            self._reading.join(PATIENCE)
            os.close(self._ours)

        return self._shown

    def _read(self) -> None:
        # Linux ends a terminal without programs with an error.
        with suppress(OSError):
            while chunk := os.read(self._ours, 65_536):
                self._shown += chunk
