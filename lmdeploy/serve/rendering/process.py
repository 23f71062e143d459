"""Renders Markdown in another process, which ends if a text takes too much time or memory.

Parsers and lexers use regular expressions. One that backtracks would hold the interpreter's lock,
and with it the whole server.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from lmdeploy.serve.rendering import child

_PACKAGE_FOLDER = Path(__file__).resolve().parents[3]
_DEADLINE_SECONDS = child.MAX_SECONDS + 10  # with the start of the process
_MAX_REPLY_BYTES = 64 << 20


class RenderingError(RuntimeError):
    """A text takes more time or memory than it may."""


class MarkdownProcess:
    """Starts the process at the first text. Texts wait for each other. For one event loop only."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None

    async def nodes(self, text: str) -> list[Any] | None:
        """Return the nodes of a text, or None if it has too many. Raise RenderingError."""
        async with self._lock:
            try:
                reply = await asyncio.wait_for(self._ask(text), _DEADLINE_SECONDS)
            except BaseException as error:  # CancelledError, too: the reply is no longer read
                await self._stop()
                if isinstance(error, OSError | EOFError | ValueError | asyncio.TimeoutError):
                    raise RenderingError from error
                raise
        nodes: list[Any] | None = json.loads(reply)["nodes"]
        return nodes

    async def close(self) -> None:
        """End the process."""
        async with self._lock:
            await self._stop()

    async def _ask(self, text: str) -> bytes:
        if self._process is None:
            self._process = await _start()
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(text).encode() + b"\n")
        await self._process.stdin.drain()
        reply = await self._process.stdout.readline()
        if not reply.endswith(b"\n"):
            raise EOFError
        return reply

    async def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def _start() -> asyncio.subprocess.Process:
    paths = [str(_PACKAGE_FOLDER), os.environ.get("PYTHONPATH", "")]
    return await asyncio.create_subprocess_exec(
        sys.executable,
        child.__file__,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        limit=_MAX_REPLY_BYTES,
    )
