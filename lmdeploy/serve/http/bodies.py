"""① Receives and parses the bodies of requests, within limits of size, number, time and memory.

Not thread-safe: only the server's event loop may use it.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from starlette.requests import ClientDisconnect

from lmdeploy.base.checks import show
from lmdeploy.serve.errors import ApiError, client_gone

if TYPE_CHECKING:
    from starlette.requests import Request

T = TypeVar("T")

MAX_BODY_BYTES = 32 << 20
# Limits of all bodies that are being received at the same time.
MAX_OPEN_BODIES = 1024
MAX_OPEN_BYTES = 8 * MAX_BODY_BYTES
# A body of at most this size never waits for bytes, so large ones cannot block small ones.
SMALL_BYTES = 1 << 16
BODY_SECONDS = 60
# Larger bodies are parsed in a worker thread, one at a time.
LARGE_BYTES = 1 << 18
# Blocks of this size go back to the system when they are freed. glibc would raise its own limit to
# 32 MiB with the first body and keep several hundred MiB after eight refused ones of 19 MiB.
_MMAP_BYTES = 4 << 20
_M_MMAP_THRESHOLD = -3  # of glibc's <malloc.h>


class BodyReader:
    """Receives bodies and counts those that are not parsed yet."""

    def __init__(self) -> None:
        self.num_bodies = 0
        self.num_bytes = 0
        self._parsing = asyncio.Lock()

    async def read(self, request: Request, parse: Callable[[bytearray], T]) -> T:
        """Return the parsed body of a request.

        Raises:
            ApiError: 413 if the body is too long, 408 if it is not complete after BODY_SECONDS, 503
                if the other bodies leave no room, and 400 if the client disconnects. Also what
                `parse` raises.
        """
        length = request.headers.get("content-length")  # h11 accepts only digits
        declared = int(length) if length else 0
        if declared > MAX_BODY_BYTES:
            raise _too_long()
        with self._open() as slot:
            body = await self._receive(request, slot=slot, declared=declared)
            if len(body) <= LARGE_BYTES:
                return parse(body)
            async with self._parsing:  # the objects take up to 25 times as much memory
                return await asyncio.to_thread(parse, body)

    async def _receive(self, request: Request, *, slot: _BodySlot, declared: int) -> bytearray:
        """Return the body if it arrives in time."""
        slot.grow(declared)
        try:
            return await asyncio.wait_for(_join_parts(request, slot), BODY_SECONDS)
        except ClientDisconnect:
            raise client_gone() from None
        except asyncio.TimeoutError:
            raise ApiError(
                408, f"The body is not complete after {BODY_SECONDS} s. Send it faster."
            ) from None

    @contextmanager
    def _open(self) -> Iterator[_BodySlot]:
        if self.num_bodies >= MAX_OPEN_BODIES:
            raise _busy(f"It already receives {self.num_bodies} bodies.")
        slot = _BodySlot(self)
        self.num_bodies += 1
        try:
            yield slot
        finally:
            self.num_bodies -= 1
            self.num_bytes -= slot.num_bytes


class _BodySlot:
    """The memory that is reserved for one body."""

    def __init__(self, reader: BodyReader) -> None:
        self._reader = reader
        self.num_bytes = 0

    def grow(self, num_bytes: int) -> None:
        """Reserve `num_bytes` in all. Raises ApiError 503 if they are not available."""
        more = num_bytes - self.num_bytes
        if more <= 0:
            return
        held = self._reader.num_bytes
        if num_bytes > SMALL_BYTES and held + more > MAX_OPEN_BYTES:
            raise _busy(f"It already receives bodies of {held} bytes.")
        self.num_bytes = num_bytes
        self._reader.num_bytes = held + more


async def _join_parts(request: Request, slot: _BodySlot) -> bytearray:
    """Receive a body. Reserve more when a body without a length grows."""
    body = bytearray()
    async for part in request.stream():
        if len(body) + len(part) > MAX_BODY_BYTES:
            raise _too_long()
        body += part
        slot.grow(len(body))
    return body


def return_large_blocks() -> None:
    """Make glibc return the memory of large bodies. Other C libraries keep their own rules."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)


def check_content_type(value: str | None) -> None:
    """Raise ApiError 415 unless a request's Content-Type is JSON.

    Browsers send other types to any server without asking it first, so a page of another site
    could send requests with them.
    """
    kind = (value or "").partition(";")[0].strip().lower()
    if kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json")):
        return
    told = "missing" if value is None else show(value)
    if kind == "application/x-www-form-urlencoded":
        told += ", which curl sends by default"
    advice = "Send the header 'Content-Type: application/json' (curl: -H)."
    raise ApiError(
        415, f"Content-Type is {told}. It must be application/json. {advice}", param="content-type"
    )


def _too_long() -> ApiError:
    return ApiError(413, f"The body is too long. It must have at most {MAX_BODY_BYTES} bytes.")


def _busy(reason: str) -> ApiError:
    return ApiError(503, f"The server is busy. {reason} Try again later.", retry_after=1)
