"""① Errors of the HTTP edge, in OpenAI's shape."""

from __future__ import annotations

import json
import logging
from typing import Any

from fastapi.responses import JSONResponse

from lmdeploy.base.checks import OptionError
from lmdeploy.chat.tokenizer import without_surrogates
from lmdeploy.engine.async_engine import EngineFailure

logger = logging.getLogger("lmdeploy")

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
}
# Options of the engine → fields of a request.
_FIELDS = {
    "stop_words": "stop",
    "random_seed": "seed",
    "max_new_tokens": "max_tokens",
    "prompt_logprobs": "logprobs",
}


class ApiError(Exception):
    """An answer with an error status; `param` names the field of the request, `retry_after` the
    seconds after which it may be sent again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.retry_after = retry_after


def to_api_error(error: Exception) -> ApiError:
    """What a client is told of an exception. One that is nobody's fault but ours is logged."""
    if isinstance(error, ApiError):
        if error.status == 500:
            logger.error("%s", error.message)
        return error
    if isinstance(error, OptionError):
        told = error.renamed(_FIELDS.get(error.field, error.field))
        return ApiError(400, str(told), param=told.field)
    if isinstance(error, EngineFailure):
        return ApiError(503, str(error))
    logger.error("%s: %s", type(error).__name__, error)
    logger.debug("traceback", exc_info=error)
    return ApiError(500, f"internal error: {type(error).__name__}: {error}")


def error_body(error: ApiError) -> dict[str, Any]:
    """The JSON of an error: one line of text, a type, the field and the status."""
    return {
        "error": {
            "message": " ".join(error.message.split()),
            "type": _TYPES.get(error.status, "server_error"),
            "param": error.param,
            "code": error.status,
        }
    }


def json_bytes(body: Any) -> bytes:
    """JSON in UTF-8, with U+FFFD for what is no text."""
    text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return without_surrogates(text).encode()


class JsonResponse(JSONResponse):
    """JSON that may hold texts as clients sent them."""

    def render(self, content: Any) -> bytes:
        """The body."""
        return json_bytes(content)


def error_response(error: ApiError) -> JsonResponse:
    """`error_body` as a response."""
    headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
    if error.retry_after is not None:
        headers["Retry-After"] = str(error.retry_after)
    return JsonResponse(error_body(error), error.status, headers)
