"""① Limits on the requests that a server accepts at the same time.

Not thread-safe: only the server's event loop may use it.
"""

from __future__ import annotations

from types import TracebackType

from lmdeploy.serve.errors import ApiError

# Limit of the prompt tokens of all running requests. A prompt counts once for each choice. A token
# takes up to 44 bytes in addition to the KV cache. One request may use half of the limit.
MAX_HELD_TOKENS = 1 << 23
# A request with at most this many prompt tokens always fits, so large ones cannot block small ones.
SMALL_TOKENS = 1 << 16


class Admission:
    """Counts the running requests and the tokens of their prompts."""

    def __init__(self, max_requests: int | None = None) -> None:
        """Set the limit: `max_requests` run at the same time. None disables the limit."""
        self._max_requests = max_requests
        self.num_requests = 0
        self.num_tokens = 0

    def check(self) -> None:
        """Raise ApiError 503 if the limit is reached."""
        if self._max_requests is not None and self.num_requests >= self._max_requests:
            raise _full(
                f"It already serves {self.num_requests} requests (--max-concurrent-requests)."
            )

    def enter(self) -> AdmissionSlot:
        """Reserve a slot for one request until `leave()`.

        Raises ApiError 503 if the limit is reached.
        """
        self.check()
        return AdmissionSlot(self)


class AdmissionSlot:
    """The slot of one request. Use it as a context manager; `leave()` is idempotent."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._num_tokens = 0
        self._is_left = False
        admission.num_requests += 1

    def hold(self, num_tokens: int) -> None:
        """Add the tokens of the request's prompts.

        Raises ApiError 503 if the prompts of the running requests leave no room for them.
        """
        held = self._admission.num_tokens
        if num_tokens > SMALL_TOKENS and held > 0 and held + num_tokens > MAX_HELD_TOKENS:
            raise _full(
                f"The prompts have {num_tokens} tokens. The running requests leave room for "
                f"{max(MAX_HELD_TOKENS - held, SMALL_TOKENS)}."
            )
        self._num_tokens += num_tokens
        self._admission.num_tokens += num_tokens

    def leave(self) -> None:
        """Free the slot and subtract its tokens."""
        if not self._is_left:
            self._is_left = True
            self._admission.num_requests -= 1
            self._admission.num_tokens -= self._num_tokens

    def __enter__(self) -> AdmissionSlot:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.leave()


def _full(reason: str) -> ApiError:
    return ApiError(503, f"The server is full. {reason} Try again later.", retry_after=1)
