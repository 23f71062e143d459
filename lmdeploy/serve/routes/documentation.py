"""The responses of the endpoints, as /openapi.json describes them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from pydantic import BaseModel

from lmdeploy.serve.errors import ANTHROPIC_PATHS

_DESCRIPTIONS = {
    400: "A field of the request is wrong, or the client disconnected.",
    401: "The API key is missing or wrong.",
    403: "The request comes from a page of another origin (--allow-origins).",
    404: "The model is not served, or the endpoint is disabled.",
    408: "The body was not complete in time.",
    413: "The body is too large.",
    415: "The Content-Type is not application/json.",
    421: "Host is not a name of the server (--allowed-hosts).",
    500: "The server failed.",
    501: "The endpoint is disabled.",
    503: "The engine failed, the server is stopping, or it holds as many requests as it takes.",
}
_OF_ALL = (403, 421)  # the errors of every endpoint
OF_POST = (400, 408, 413, 415, 500, 503)  # the errors of every POST endpoint
# With `stream`. Tools disagree whether a schema describes an event or the whole text.
EVENTS = {"content": {"text/event-stream": {"schema": {"description": "Server-sent events."}}}}


class ErrorDetail(BaseModel):
    """Why a request failed."""

    message: str
    type: str
    param: str | None  # the wrong field, if it is one field
    code: int | str  # the status, or the kind of error


class ErrorResponse(BaseModel):
    """The body of every error of OpenAI's API and the server's own."""

    error: ErrorDetail


class AnthropicError(BaseModel):
    """The body of every error of Anthropic's API."""

    type: Literal["error"]
    error: dict[str, Any]  # type, message and perhaps details


Documented = dict[int | str, dict[str, Any]]


def documented(*statuses: int, events: bool = False) -> Documented:
    """Return FastAPI's `responses` for errors with these statuses.

    `events`: the response can be a stream of server-sent events.
    """
    errors: Documented = {
        status: {"model": ErrorResponse, "description": _DESCRIPTIONS[status]}
        for status in sorted(statuses)
    }
    return {200: EVENTS, **errors} if events else errors


def finish_schema(schema: dict[str, Any], *, has_keys: bool) -> None:
    """Complete the schema of FastAPI in place.

    FastAPI describes its own validation errors, which this server replaces. With API keys, every
    endpoint except /health needs one.
    """
    schemas = schema["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    refused = {str(status): _described(status) for status in _OF_ALL}
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            operation["responses"].update(refused)
            if has_keys and path != "/health":
                operation["responses"]["401"] = _described(401)
                operation["security"] = [{"api_key": []}]
        if path.startswith(ANTHROPIC_PATHS):
            schemas[AnthropicError.__name__] = AnthropicError.model_json_schema()
            _set_error_model(operations.values(), AnthropicError.__name__)
    if has_keys:
        scheme = {"type": "http", "scheme": "bearer"}
        schema["components"]["securitySchemes"] = {"api_key": scheme}


def _set_error_model(operations: Iterable[dict[str, Any]], name: str) -> None:
    """Let the errors of operations have another model."""
    schema = {"$ref": f"#/components/schemas/{name}"}
    for operation in operations:
        for status, response in operation["responses"].items():
            if int(status) >= 400:
                content = {"application/json": {"schema": schema}}
                operation["responses"][status] = {**response, "content": content}


def _described(status: int) -> dict[str, Any]:
    schema = {"$ref": "#/components/schemas/ErrorResponse"}
    content = {"application/json": {"schema": schema}}
    return {"description": _DESCRIPTIONS[status], "content": content}
