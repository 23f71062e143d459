"""/openapi.json, made from the routes and what they say about themselves."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.routing import Route

from lmdeploy.serve.errors import ANTHROPIC_PATHS
from lmdeploy.serve.schema import ApiRequest
from lmdeploy.version import __version__

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
OF_POST = (400, 408, 413, 415, 500, 503)  # the errors of every endpoint with a body
_REFERENCE = "#/components/schemas/{model}"
# Tools disagree whether a schema describes an event or the whole text.
_EVENTS = {"text/event-stream": {"schema": {"description": "Server-sent events."}}}


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


@dataclass(frozen=True)
class About:
    """The part of /openapi.json about a route that its path and methods do not tell.

    Args:
        errors: statuses besides those of every endpoint.
        body: the class of the JSON body. None if it has none.
        query: the schemas of the query's parameters.
        content: the media type of the response.
        events: the response can be a stream of server-sent events.
    """

    errors: Sequence[int] = ()
    body: type[ApiRequest] | None = None
    query: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    content: str = "application/json"
    events: bool = False


class ApiRoute(Route):
    """A route that /openapi.json describes, unless `about` is None."""

    about: About | None = None


def make_document(routes: Iterable[ApiRoute], *, has_keys: bool) -> dict[str, Any]:
    """Return /openapi.json. With API keys, every endpoint except /health needs one."""
    paths: dict[str, dict[str, Any]] = {}
    models: list[type[BaseModel]] = [ErrorResponse, AnthropicError]
    for route in routes:
        if route.about is None:
            continue
        if route.about.body is not None:
            models.append(route.about.body)
        operation = _operation(route, route.about, needs_key=has_keys and route.path != "/health")
        for method in sorted((route.methods or set()) - {"HEAD"}):
            named = {**operation, "operationId": f"{route.name}_{method.lower()}"}
            paths.setdefault(route.path_format, {})[method.lower()] = named
    _, definitions = models_json_schema(
        [(model, "validation") for model in models], ref_template=_REFERENCE
    )
    components = {"schemas": definitions["$defs"]}
    if has_keys:
        components["securitySchemes"] = {"api_key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "lmdeploy-fp4", "version": __version__},
        "paths": paths,
        "components": components,
    }


def _operation(route: ApiRoute, about: About, *, needs_key: bool) -> dict[str, Any]:
    content: dict[str, Any] = {about.content: {"schema": {}}}
    operation: dict[str, Any] = {
        "summary": route.name.replace("_", " ").title(),
        "description": inspect.getdoc(route.endpoint),
        "parameters": list(_parameters(route, about)),
        "responses": {
            "200": {
                "description": "Successful Response",
                "content": content | _EVENTS if about.events else content,
            }
        },
    }
    if about.body is not None:
        operation["requestBody"] = {"required": True, "content": _json(about.body.__name__)}
    is_anthropic = route.path.startswith(ANTHROPIC_PATHS)
    model = (AnthropicError if is_anthropic else ErrorResponse).__name__
    for status in sorted({*about.errors, *_OF_ALL, *((401,) if needs_key else ())}):
        described = {"description": _DESCRIPTIONS[status], "content": _json(model)}
        operation["responses"][str(status)] = described
    if needs_key:
        operation["security"] = [{"api_key": []}]
    return operation


def _parameters(route: ApiRoute, about: About) -> Iterator[dict[str, Any]]:
    for name in route.param_convertors:
        yield {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
    for name, schema in about.query.items():
        yield {"name": name, "in": "query", "required": False, "schema": schema}


def _json(model: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REFERENCE.format(model=model)}}}
