"""④⑨ Reads the mailboxes of the replicas and hands each output to its request."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

from lmdeploy.replicas.transport import First, Letter, Output

Item = TypeVar("Item", covariant=True)


class Stream(Protocol, Generic[Item]):
    """A call of a replica that sends items."""

    def __aiter__(self) -> AsyncIterator[Item]: ...

    def cancel(self) -> None:
        """End the call, also on the replica."""
        ...


class LostReplica(Exception):
    """A replica has died or is silent."""


class Links:
    """One call for each mailbox that has requests of this core. One event loop uses them.

    Invariant: each request gets its outputs in order and without a gap, or an exception.
    """

    def __init__(
        self, read: Callable[[First], Stream[list[Letter]]], *, silent_seconds: float
    ) -> None:
        """Begin without links.

        Args:
            read: starts to read the mailbox that a first output names.
            silent_seconds: a replica that sends no sign of life for this time is given up.
        """
        self._read = read
        self._silent_seconds = silent_seconds
        self._tickets = itertools.count()
        self._inboxes: dict[int, asyncio.Queue[Output | Exception]] = {}
        self._users: dict[str, set[int]] = {}  # tickets of the requests of each open mailbox
        self._tasks: set[asyncio.Task[None]] = set()

    def new_ticket(self) -> int:
        """Return the ticket of a request that is about to be sent."""
        ticket = next(self._tickets)
        self._inboxes[ticket] = asyncio.Queue()
        return ticket

    async def outputs(
        self, ticket: int, call: Stream[First | None]
    ) -> AsyncGenerator[Output, None]:
        """Yield the outputs of the request that `call` has started.

        Raise LostReplica, or what the call raises. The end of the iteration frees the ticket.
        """
        mailbox = ""
        try:
            items = aiter(call)  # as long as this lives, the call does
            first = await self._first(items)
            yield first.output
            mailbox = first.mailbox
            self._join(ticket, first)
            inbox = self._inboxes[ticket]
            while True:
                item = await inbox.get()
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            del self._inboxes[ticket]
            self._users.get(mailbox, set()).discard(ticket)

    async def close(self) -> None:
        """Cancel all calls that read mailboxes."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _first(self, items: AsyncIterator[First | None]) -> First:
        while True:
            item = await self._next(items)
            if item is not None:
                return item

    async def _next(self, items: AsyncIterator[Item]) -> Item:
        try:
            return await asyncio.wait_for(anext(items), self._silent_seconds)
        except asyncio.TimeoutError:
            raise LostReplica("the replica is silent") from None
        except StopAsyncIteration:
            raise LostReplica("the replica has ended the call") from None

    def _join(self, ticket: int, first: First) -> None:
        """Add a request to the users of its mailbox. Read the mailbox if no call does."""
        users = self._users.get(first.mailbox)
        if users is None:
            users = self._users[first.mailbox] = set()
            task = asyncio.create_task(self._deliver(first))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        users.add(ticket)

    async def _deliver(self, first: First) -> None:
        """Put the outputs in a mailbox into the inboxes until the call ends or breaks."""
        call = self._read(first)
        failure = LostReplica("the core is closed")
        try:
            items = aiter(call)
            while True:
                for ticket, output in await self._next(items):
                    if ticket in self._inboxes:  # else the request is cancelled
                        self._inboxes[ticket].put_nowait(output)
        except LostReplica as error:
            failure = error
        except Exception as error:  # Ray raises many kinds for a replica that died
            failure = LostReplica(f"{type(error).__name__}: {error}")
        finally:
            for ticket in self._users.pop(first.mailbox):
                self._inboxes[ticket].put_nowait(failure)
            with suppress(Exception):
                call.cancel()
