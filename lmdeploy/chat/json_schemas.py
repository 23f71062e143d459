"""The schema of a tool's arguments as one object, whatever form the client wrote it in."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

DEFINITIONS = ("$defs", "definitions")
UNIONS = ("anyOf", "oneOf")
# Keywords that do not change what is valid.
NOTES = {
    *("$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default"),
    *("examples", "deprecated", "readOnly", "writeOnly", "nullable"),
}
MAX_DEPTH = 16  # of references and of combined schemas
MAX_STEPS = 1000  # through the references and parts of one schema


def resolve(reference: Any, root: Schema) -> Any:
    """Return the schema that a reference within the same document names, or None."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found: Any = root
    for name in reference.removeprefix("#").removeprefix("/").split("/"):
        if not name:
            continue
        name = name.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, dict) else None
    return found


def with_own_properties(schema: Schema) -> Schema:
    """Return a schema of an object in which `$ref` and `allOf` at the top are merged.

    Unions stay. Their parts may repeat or refine the properties beside them.
    """
    merged = merge(schema, schema)
    for name in DEFINITIONS:
        if name in schema:
            merged[name] = schema[name]
    return merged


def with_all_properties(schema: Schema) -> Schema:
    """Return a schema from `with_own_properties` in which unions at the top are merged, too.

    It has the properties of all parts and requires what every part requires.
    """
    merged = dict(schema)
    for word in UNIONS:
        parts = merged.pop(word, None)
        if isinstance(parts, list) and parts:
            alternatives = [with_all_properties(merge(part, schema)) for part in parts[:MAX_DEPTH]]
            merged = _both(merged, _any_of(alternatives))
    return merged


def merge(schema: Any, root: Schema, *, depth: int = 0, left: list[int] | None = None) -> Schema:
    """Return a schema in which `$ref` and `allOf` are merged. `root` has the definitions.

    Keywords that cannot be merged stay in `allOf`. References can repeat each other without end, so
    that at most MAX_STEPS parts are merged, and `left` has how many may follow.
    """
    left = [MAX_STEPS] if left is None else left
    left[0] -= 1
    if left[0] < 0:
        return {}
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return {}
    own = {key: value for key, value in schema.items() if key not in ("$ref", "allOf")}
    parts = schema.get("allOf", [])
    parts = [*(parts[:MAX_DEPTH] if isinstance(parts, list) else [])]
    if "$ref" in schema:
        parts.append(resolve(schema["$ref"], root))
    for part in parts:
        own = _both(own, merge(part, root, depth=depth + 1, left=left))
    return own


def _both(one: Schema, other: Schema) -> Schema:
    """Return the schema of objects that fit both."""
    properties = dict(properties_of(one))
    for key, schema in properties_of(other).items():
        known = properties.get(key, schema)
        properties[key] = schema if known == schema else {"allOf": [known, schema]}
    required = [*dict.fromkeys([*required_of(one), *required_of(other)])]
    merged = {**other, **one}
    apart = one.keys() & other.keys() - NOTES - {"properties", "required"}
    apart = {key for key in apart if one[key] != other[key]}
    if apart:  # a keyword cannot have two values
        merged = {key: value for key, value in merged.items() if key not in apart}
        merged["allOf"] = [{key: each[key] for key in sorted(apart)} for each in (one, other)]
    if properties:
        merged["properties"] = properties
    if required:
        merged["required"] = required
    return merged


def _any_of(schemas: list[Schema]) -> Schema:
    """Return a schema of objects that fit any of these. Others may fit it, too."""
    found: dict[str, list[Any]] = {}
    for schema in schemas:
        for key, value in properties_of(schema).items():
            known = found.setdefault(key, [])
            if value not in known:
                known.append(value)
    properties = {
        key: each[0] if len(each) == 1 else {"anyOf": each} for key, each in found.items()
    }
    required = [key for key in properties if all(key in required_of(schema) for schema in schemas)]
    return {"properties": properties, "required": required}


def properties_of(schema: Schema) -> Schema:
    """Return the properties of an object's schema."""
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else {}


def required_of(schema: Schema) -> list[str]:
    """Return the names of the required properties."""
    required = schema.get("required")
    return [key for key in required if isinstance(key, str)] if isinstance(required, list) else []
