"""One replica: an engine that generates token ids. Ray Serve runs it in a process of its own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any

from lmdeploy._turbomind import InvalidArgument, RequestOutput
from lmdeploy.base.checks import OptionError
from lmdeploy.base.logs import set_log_level
from lmdeploy.config.engine import TurbomindEngineConfig
from lmdeploy.engine.async_engine import AsyncEngine
from lmdeploy.replicas.output_stream import OutputStream
from lmdeploy.replicas.transport import Fields, StreamAddress, Submission, make_request


class EngineReplica:
    """The class of the Ray Serve deployment. Its methods run in one event loop."""

    def __init__(
        self,
        model_path: str,
        config: TurbomindEngineConfig,
        *,
        log_level: str,
        release: str = "",
        replica_id: str | None = None,
    ) -> None:
        """Load the engine.

        Args:
            model_path: as in `load_engine`.
            config: options of the engine.
            log_level: log level of this process.
            release: hash of the options. `describe` returns it.
            replica_id: the id by which the router finds this replica (default: Ray Serve's).
        """
        set_log_level(log_level)
        self._release = release
        if replica_id is None:
            from ray import serve

            replica_id = str(serve.get_replica_context().replica_id.unique_id)
        self._id = replica_id
        self._streams: dict[str, OutputStream] = {}  # by client
        self._engine = AsyncEngine.load(model_path, config, progress=False)
        self._grammars = self._engine.new_grammars()

    def check_health(self) -> None:
        """Raise EngineFailure if the engine has failed. Ray Serve then replaces the replica."""
        self._engine.check_healthy()

    def describe(self) -> dict[str, Any]:
        """Return what the command and users ask about this replica.

        The release, the fields of the engine's memory plan as `plan`, the line about its device as
        `device`, and the GPUs that Ray has reserved for it, separated by commas, as `gpus`.
        """
        return {
            "release": self._release,
            "plan": self._engine.memory_plan().to_dict(),
            "device": self._engine.running.device_line,
            "gpus": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
        }

    async def generate(self, submission: Submission) -> AsyncIterator[StreamAddress]:
        """Yield the address of the output stream, which gets all outputs. End with the request.

        Serve counts this call as the load of the replica as long as the request runs. When the
        client cancels the call or its stream closes, the request is cancelled.
        """
        stream = self._open_stream(submission.client)
        sink = _Sink(stream, submission.attempt)
        yield StreamAddress(self._id, stream.name)
        request_id = 0  # that no request has
        try:
            request = await asyncio.to_thread(
                make_request, submission.fields, grammars=self._grammars
            )
            await self._engine.relay(request, sink)
            request_id = request.id
            await asyncio.wait([sink.ended, stream.closed], return_when=asyncio.FIRST_COMPLETED)
        except Exception as error:
            sink.fail(error)
        finally:
            self._engine.forget(request_id)
            sink.fail(RuntimeError("The request was cancelled."))

    async def read(self, address: StreamAddress) -> AsyncIterator[list[Fields]]:
        """Yield the outputs of a stream as `OutputStream.read` does."""
        streams = [item for item in self._streams.values() if item.name == address.stream]
        if not streams:
            raise LookupError(f"The output stream {address.stream} is not open.")
        outputs = streams[0].read()
        try:
            async for batch in outputs:
                yield batch
        finally:
            await outputs.aclose()  # type: ignore[attr-defined]

    def _open_stream(self, client: str) -> OutputStream:
        """Return the open stream of a client. The client has time to read it."""
        for name in [name for name, item in self._streams.items() if item.closed.done()]:
            del self._streams[name]
        if client not in self._streams:
            self._streams[client] = OutputStream()
        self._streams[client].renew()
        return self._streams[client]

    def __del__(self) -> None:
        engine = getattr(self, "_engine", None)
        if engine is not None:
            engine.close()


class _Sink:
    """Puts the outputs of one request into a stream. Its last one has a finish reason."""

    def __init__(self, stream: OutputStream, attempt: int) -> None:
        self._stream = stream
        self._attempt = attempt
        self.loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self.loop.create_future()

    def deliver(self, output: RequestOutput | Exception) -> None:
        """Take an output, or the exception that ends the request."""
        if isinstance(output, Exception):
            self.fail(output)
        else:
            self._put({**output.to_dict(), "request_id": self._attempt})

    def fail(self, error: Exception) -> None:
        """End the request with an error unless it has ended."""
        field = error.field if isinstance(error, (OptionError, InvalidArgument)) else ""
        self._put(
            {
                "request_id": self._attempt,
                "finish_reason": "error",
                "error": str(error),
                "is_request_fault": isinstance(error, ValueError),
                "error_field": field,
            }
        )

    def _put(self, fields: Fields) -> None:
        if self.ended.done():
            return
        if fields["finish_reason"] != "none":
            self.ended.set_result(None)
        self._stream.put(fields)
