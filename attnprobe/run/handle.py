"""The scan's end of one worker: its process, the conversation with it, and what it prints."""

from __future__ import annotations

import contextlib
import os
import select
import socket
from typing import IO

from attnprobe.run.protocol import Reply, Request, last_line, receive_reply, send


class WorkerHandle:
    """The scan's end of one worker."""

    def __init__(self, channel: socket.socket, output: IO[bytes]) -> None:
        """Take over our end of the conversation, and the file that the worker prints into."""
        self.pid = 0
        """0 until the zygote has said it."""
        self._channel = channel
        self._output = output
        self._mark = 0
        self.begun = 0
        """How many runs of a backend this worker has begun."""

    def ask(self, request: Request) -> None:
        """Send a request; a worker that is gone shows at the next reply."""
        self._mark = os.fstat(self._output.fileno()).st_size
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            send(self._channel, request)

    def reply(self, limit: float) -> Reply | str | None:
        """Return the next message, None where the worker is gone, "hung" where it takes too long."""
        readable, _, _ = select.select([self._channel], [], [], limit)
        return receive_reply(self._channel) if readable else "hung"

    def said(self) -> str:
        """Return the last line that was printed since the last request."""
        return last_line(self._output.fileno(), self._mark)

    def close(self) -> None:
        """Close the channel and forget the output."""
        self._channel.close()
        self._output.close()
