"""④⑨ Sends the outputs of many requests of one core in one message per step."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator

from lmdeploy.replicas.transport import Letter, Output

# A replica that computes a long prompt sends no token, but it sends a sign of life this often.
HEARTBEAT_SECONDS = 0.5
_COALESCE_SECONDS = 0.005  # outputs within this time travel in one message
_IDLE_SECONDS = 10.0  # a mailbox without requests is closed after this time


class Mailbox:
    """Collects the outputs of all requests that one core has on this replica.

    Invariants:
        1. At most one call reads a mailbox, from the first output to the last, so no output is lost
           unless that call breaks.
        2. A mailbox whose reader has ended is closed for ever. The core restarts the requests whose
           outputs it held.
    """

    def __init__(self, core: str) -> None:
        self.name = secrets.token_hex(8)
        self.core = core
        self.num_requests = 0  # that write to it
        self.is_read = False
        self.left_at = 0.0  # when the last request ended
        self._letters: list[Letter] = []
        self._has_letters = asyncio.Event()

    @property
    def has_letters(self) -> bool:
        """Return whether outputs wait for the reader."""
        return bool(self._letters)

    def put(self, ticket: int, output: Output) -> None:
        """Add an output of the request with this ticket."""
        self._letters.append((ticket, output))
        self._has_letters.set()

    async def take(self) -> list[Letter]:
        """Return the next outputs of all requests, or none after HEARTBEAT_SECONDS."""
        try:
            await asyncio.wait_for(self._has_letters.wait(), HEARTBEAT_SECONDS)
        except asyncio.TimeoutError:
            return []
        await asyncio.sleep(_COALESCE_SECONDS)
        letters, self._letters = self._letters, []
        self._has_letters.clear()
        return letters


class Mailboxes:
    """The mailboxes of one replica: at most one open for each core. One event loop uses them."""

    def __init__(self, *, idle_seconds: float = _IDLE_SECONDS) -> None:
        self._of_core: dict[str, Mailbox] = {}
        self._idle_seconds = idle_seconds

    def enter(self, core: str) -> Mailbox:
        """Return the open mailbox of a core, for one more request."""
        self._drop_forgotten()
        mailbox = self._of_core.setdefault(core, Mailbox(core))
        mailbox.num_requests += 1
        return mailbox

    def leave(self, mailbox: Mailbox) -> None:
        """Count the end of a request.

        A mailbox that nobody reads ends with its last request, unless it has outputs: their core
        may be about to read them.
        """
        mailbox.num_requests -= 1
        mailbox.left_at = time.monotonic()
        if not mailbox.num_requests and not mailbox.is_read and not mailbox.has_letters:
            self._close(mailbox)

    async def read(self, name: str) -> AsyncIterator[list[Letter]]:
        """Yield the outputs in a mailbox until it has been idle. An empty list is a sign of life.

        Raise LookupError if no mailbox of this name is open or another call reads it.
        """
        mailbox = next((box for box in self._of_core.values() if box.name == name), None)
        if mailbox is None or mailbox.is_read:
            raise LookupError(f"The mailbox {name} is not open.")
        mailbox.is_read = True
        used_at = time.monotonic()
        try:
            while (
                mailbox.num_requests
                or mailbox.has_letters
                or time.monotonic() < used_at + self._idle_seconds
            ):
                if mailbox.num_requests:
                    used_at = time.monotonic()
                yield await mailbox.take()
        finally:
            self._close(mailbox)

    def _drop_forgotten(self) -> None:
        """Close the mailboxes of cores that have ended before they read their outputs."""
        oldest = time.monotonic() - self._idle_seconds
        for mailbox in list(self._of_core.values()):
            if not mailbox.num_requests and not mailbox.is_read and mailbox.left_at < oldest:
                self._close(mailbox)

    def _close(self, mailbox: Mailbox) -> None:
        if self._of_core.get(mailbox.core) is mailbox:
            del self._of_core[mailbox.core]
