"""The part of a tool's schema that describes one argument."""

from __future__ import annotations

from typing import Any

from lmdeploy.chat.json_schemas import DEFINITIONS, MAX_DEPTH, MAX_STEPS, UNIONS, Schema, resolve

PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}  # as templates write them

_ALL_TYPES = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})


def property_schema(parameters: Schema, key: str) -> Schema:
    """Return the schema of one property, with the definitions that its references need."""
    properties = parameters.get("properties")
    schema = properties.get(key) if isinstance(properties, dict) else None
    if not isinstance(schema, dict):
        return {}
    definitions = {name: parameters[name] for name in DEFINITIONS if name in parameters}
    return {**definitions, **schema}


def argument_types(parameters: Schema, key: str) -> set[str]:
    """Return the JSON types that an argument may have.

    An argument without a schema is a string, which is how models write it.
    """
    schema = property_schema(parameters, key)
    if not schema.keys() - set(DEFINITIONS):
        return {"string"}
    return _types(schema, schema, depth=0, left=[MAX_STEPS])


def _types(schema: Any, root: Schema, *, depth: int, left: list[int]) -> set[str]:
    left[0] -= 1  # references can repeat each other without end
    if not isinstance(schema, dict) or depth > MAX_DEPTH or left[0] < 0:
        return set(_ALL_TYPES)
    if "$ref" in schema:
        return _types(resolve(schema["$ref"], root), root, depth=depth + 1, left=left)
    declared = schema.get("type")
    if isinstance(declared, str):
        return {declared}
    if isinstance(declared, list):
        return {name for name in declared if isinstance(name, str)}
    for values in (schema.get("enum"), [schema["const"]] if "const" in schema else None):
        if isinstance(values, list):
            return {type_of(value) for value in values}
    for word in UNIONS:
        if isinstance(schema.get(word), list):
            found = [_types(part, root, depth=depth + 1, left=left) for part in schema[word]]
            return set().union(*found)
    if isinstance(schema.get("allOf"), list):
        found = [_types(part, root, depth=depth + 1, left=left) for part in schema["allOf"]]
        return set(_ALL_TYPES).intersection(*found)
    return set(_ALL_TYPES)


def type_of(value: Any) -> str:
    """Return the name that JSON schemas have for the type of a value."""
    if isinstance(value, bool):
        return "boolean"
    names: dict[type, str] = {
        int: "integer",
        float: "number",
        str: "string",
        list: "array",
        dict: "object",
    }
    return names.get(type(value), "null")
