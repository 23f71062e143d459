"""The bodies of requests in /openapi.json, so that /docs can send them.

Routes read their bodies themselves, to name what is wrong with them in our words.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

from lmdeploy.serve.schema import ApiRequest


def describe_bodies(app: FastAPI, bodies: Mapping[str, type[ApiRequest]]) -> None:
    """Adds the schemas of POST routes: path → its body."""
    make_schema = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is not None:
            return app.openapi_schema
        schema = make_schema()
        places, definitions = models_json_schema(
            [(body, "validation") for body in bodies.values()],
            ref_template="#/components/schemas/{model}",
        )
        schema.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
        for path, body in bodies.items():
            schema["paths"][path]["post"]["requestBody"] = {
                "required": True,
                "content": {"application/json": {"schema": places[body, "validation"]}},
            }
        return schema

    app.openapi = openapi  # type: ignore[method-assign]
