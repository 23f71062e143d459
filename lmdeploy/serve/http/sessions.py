"""The running requests of each `session_id`, which POST /abort_request can end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from lmdeploy.serve.jobs import Job

SessionId = int | str | None
NO_SESSION = (None, -1)


class Sessions:
    """Finds the jobs of a session. Only the server's event loop may use it."""

    def __init__(self) -> None:
        self._requests: dict[SessionId, list[Sequence[Job]]] = {}

    @contextmanager
    def run(self, session_id: SessionId, jobs: Sequence[Job]) -> Iterator[None]:
        """Keep the jobs of one request under its session until the context ends.

        `jobs` may still be empty.
        """
        if session_id in NO_SESSION:
            yield
            return
        requests = self._requests.setdefault(session_id, [])
        requests.append(jobs)
        try:
            yield
        finally:
            requests[:] = [others for others in requests if others is not jobs]
            if not requests:
                del self._requests[session_id]

    def request_ids(self, session_id: SessionId) -> list[int] | None:
        """Return the engine's ids of a session's requests, or None if none of them runs."""
        requests = self._requests.get(session_id)
        if requests is None:
            return None
        return [job.stream.request_id for jobs in requests for job in jobs]
