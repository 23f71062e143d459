"""① Errors of the HTTP edge, in OpenAI's shape."""

from __future__ import annotations

from typing import Any

from fastapi.responses import JSONResponse

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
}


class ApiError(Exception):
    """An answer with an error status; `param` names the field of the request."""

    def __init__(self, status: int, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param


def error_body(status: int, message: str, *, param: str | None = None) -> dict[str, Any]:
    """The JSON of an error: one line of text, a type, the field and the status."""
    return {
        "error": {
            "message": " ".join(message.split()),
            "type": _TYPES.get(status, "server_error"),
            "param": param,
            "code": status,
        }
    }


def error_response(status: int, message: str, *, param: str | None = None) -> JSONResponse:
    """`error_body` as a response."""
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return JSONResponse(error_body(status, message, param=param), status, headers)
