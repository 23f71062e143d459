"""① How much a server takes on at once. Used in its event loop."""

from __future__ import annotations

from types import TracebackType

from lmdeploy.serve.errors import ApiError

# Prompts of all requests that are not yet answered, once per answer; up to 44 bytes a token, beside
# the cache. Twice what one request may have.
MAX_HELD_TOKENS = 1 << 23
# Such requests always find room: a few large ones do not shut them out.
SMALL_TOKENS = 1 << 16


class Admission:
    """Counts requests that are being answered, and the tokens of their prompts."""

    def __init__(self, max_requests: int | None = None) -> None:
        """`max_requests`: more at once are refused; None: any number."""
        self._max_requests = max_requests
        self.num_requests = 0
        self.num_tokens = 0

    def enter(self) -> AdmissionSlot:
        """A place for one request, until it is left. ApiError 503 when there is none."""
        if self._max_requests is not None and self.num_requests >= self._max_requests:
            raise _full(
                f"it answers {self.num_requests} requests, which is all that it takes at once "
                "(--max-concurrent-requests)"
            )
        return AdmissionSlot(self)


class AdmissionSlot:
    """Of one request. A context manager; `leave` may be called again."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._num_tokens = 0
        self._is_left = False
        admission.num_requests += 1

    def hold(self, num_tokens: int) -> None:
        """Adds prompts. ApiError 503 when those of other requests leave no room for them."""
        held = self._admission.num_tokens
        if num_tokens > SMALL_TOKENS and held > 0 and held + num_tokens > MAX_HELD_TOKENS:
            raise _full(
                f"got {num_tokens} tokens of prompts, wanted at most "
                f"{max(MAX_HELD_TOKENS - held, SMALL_TOKENS)} beside those of other requests"
            )
        self._num_tokens += num_tokens
        self._admission.num_tokens += num_tokens

    def leave(self) -> None:
        """The request is answered, or never will be."""
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
    return ApiError(503, f"the server is full: {reason}; try again later", retry_after=1)
