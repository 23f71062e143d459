"""① Errors of the HTTP server, in OpenAI's format or Anthropic's."""

from __future__ import annotations

import json
import logging
from json.encoder import encode_basestring
from typing import Any

from starlette.responses import JSONResponse

from lmdeploy.base.checks import ContextLengthError, OptionError
from lmdeploy.base.errors import EngineFailure, UnavailableError
from lmdeploy.chat.tokenizer import without_surrogates

logger = logging.getLogger("lmdeploy")

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    421: "invalid_request_error",
}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
ANTHROPIC_PATHS = ("/v1/messages", "/anthropic/")  # beginnings of the paths of its API
# The engine's name of an option → the field of a request.
_FIELDS = {
    "stop_words": "stop",
    "random_seed": "seed",
    "max_new_tokens": "max_tokens",
    "prompt_logprobs": "logprobs",
}


class ApiError(Exception):
    """A response with an error status.

    Args:
        status: HTTP status code.
        message: the text for the client.
        param: the request field that is wrong, if it is one field.
        code: the kind of error for programs. None uses the status.
        retry_after: seconds after which the client may retry, for the header `Retry-After`.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after


def to_api_error(error: Exception) -> ApiError:
    """Convert an exception into an ApiError.

    Unexpected exceptions are logged and become HTTP 500.
    """
    if isinstance(error, ApiError):
        if error.status == 500:
            logger.error("%s", error.message)
        return error
    if isinstance(error, OptionError):
        told = error.renamed(_FIELDS.get(error.field, error.field))
        if isinstance(told, ContextLengthError):
            # Clients recognize an overflow by this beginning or by the code.
            message = f"This model's maximum context length is {told.limit} tokens. However, {told}"
            return ApiError(400, message, param=told.field, code="context_length_exceeded")
        return ApiError(400, str(told), param=told.field)
    if isinstance(error, UnavailableError):
        return ApiError(503, str(error), retry_after=1)
    if isinstance(error, EngineFailure):
        return ApiError(503, str(error))
    logger.error("%s: %s", type(error).__name__, error)
    logger.debug("traceback", exc_info=error)
    return ApiError(500, f"Internal error: {type(error).__name__}: {error}")


def error_body(error: ApiError) -> dict[str, Any]:
    """Return the JSON object of an error: message (one line), type, param and code."""
    return {
        "error": {
            "message": " ".join(error.message.split()),
            "type": _TYPES.get(error.status, "server_error"),
            "param": error.param,
            "code": error.status if error.code is None else error.code,
        }
    }


def anthropic_error_body(error: ApiError) -> dict[str, Any]:
    """Return the JSON object of an error in Anthropic's form."""
    others = "invalid_request_error" if error.status < 500 else "api_error"
    kind = _ANTHROPIC_TYPES.get(error.status, others)
    message = " ".join(error.message.split())
    if error.code == "context_length_exceeded":
        message = f"prompt is too long: {message}"  # clients recognize an overflow by these words
    told: dict[str, Any] = {"type": kind, "message": message}
    if error.param == "thread":  # clients then send the whole conversation
        told["details"] = {"error_code": "thread_unsupported_request"}
    return {"type": "error", "error": told}


# json.dumps() would make one for every event.
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
# JSON may contain them, but clients that read events with str.splitlines end a line there.
_LINE_ENDS = "\x85\u2028\u2029"


def json_bytes(body: Any) -> bytes:
    """Return `body` as one line of JSON in UTF-8. Lone surrogates become U+FFFD."""
    return _one_line(_ENCODER.encode(body))


def json_text(text: str) -> bytes:
    """Return what `json_bytes` does for a text, in a tenth of the time."""
    return _one_line(encode_basestring(text))


def _one_line(text: str) -> bytes:
    """Return JSON as bytes without line ends and lone surrogates."""
    if text.isascii():
        return text.encode()
    for end in _LINE_ENDS:
        if end in text:
            text = text.replace(end, f"\\u{ord(end):04x}")
    return without_surrogates(text).encode()


class JsonResponse(JSONResponse):
    """A JSON response that may contain the client's own text, with lone surrogates replaced."""

    def render(self, content: Any) -> bytes:
        return json_bytes(content)


def error_response(error: ApiError, path: str = "") -> JsonResponse:
    """Return the HTTP response of an error at a path, with the headers of 401, 408 and 503."""
    headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
    if error.status == 408:
        headers["Connection"] = "close"
    if error.retry_after is not None:
        headers["Retry-After"] = str(error.retry_after)
    form = anthropic_error_body if path.startswith(ANTHROPIC_PATHS) else error_body
    return JsonResponse(form(error), error.status, headers)


def refusal(error: Exception, path: str = "") -> JsonResponse:
    """Return the response of an exception at a path, and free what the exception holds.

    The frames of a traceback hold the body of the request and often the exception itself. Without
    that cycle, the memory is freed at once and not by a later run of the garbage collector.
    """
    response = error_response(to_api_error(error), path)
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return response


def client_gone() -> ApiError:
    """Return the error of a request whose client has disconnected."""
    return ApiError(400, "The client disconnected.")
