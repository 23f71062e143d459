"""The running requests of each key and `session_id`, which POST /abort_request can end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from lmdeploy.serve.jobs import Job

SessionId = int | str | None
NO_SESSION = (None, -1)


class Sessions:
    """Finds the jobs of an owner and of a session. Only the server's event loop may use it.

    An owner is the API key that sent a request, or "" on a server without keys. Sessions of
    different owners are different, whatever their ids.
    """

    def __init__(self) -> None:
        # A session without an id has None.
        self._requests: dict[tuple[str, SessionId], list[Sequence[Job]]] = {}

    @contextmanager
    def run(self, session_id: SessionId, jobs: Sequence[Job], *, owner: str = "") -> Iterator[None]:
        """Keep the jobs of one request under its owner and session until the context ends.

        `jobs` may still be empty.
        """
        key = (owner, None if session_id in NO_SESSION else session_id)
        requests = self._requests.setdefault(key, [])
        requests.append(jobs)
        try:
            yield
        finally:
            requests[:] = [others for others in requests if others is not jobs]
            if not requests:
                del self._requests[key]

    def request_ids(self, session_id: SessionId, *, owner: str = "") -> list[int] | None:
        """Return the engine's ids of a session's requests, or None if none of them runs."""
        return _ids_of(self._requests.get((owner, session_id)))

    def all_request_ids(self, *, owner: str) -> list[int]:
        """Return the engine's ids of an owner's requests."""
        found = (requests for key, requests in self._requests.items() if key[0] == owner)
        return [request_id for requests in found for request_id in _ids_of(requests) or ()]


def _ids_of(requests: Sequence[Sequence[Job]] | None) -> list[int] | None:
    if requests is None:
        return None
    return [job.stream.request_id for jobs in requests for job in jobs]
