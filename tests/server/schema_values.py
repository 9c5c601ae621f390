"""Values that a JSON schema of the OpenAPI document allows, and values at and over its bounds."""

from typing import Any

from hypothesis import strategies as st

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def allowed(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Only for what the document uses; another keyword is an error here, not a silent gap."""
    if "anyOf" in schema:
        return st.one_of([allowed(option) for option in schema["anyOf"]])
    if "const" in schema or "enum" in schema:
        return st.sampled_from(schema.get("enum") or [schema["const"]])
    match schema.get("type"):
        case "null":
            return st.none()
        case "boolean":
            return st.booleans()
        case "string":
            return st.text(min_size=schema.get("minLength", 0), max_size=schema.get("maxLength", 20))
        case "integer" | "number" as kind:
            return _numbers(schema, kind)
        case "array":
            size = {"min_size": schema.get("minItems", 0), "max_size": min(schema.get("maxItems", 5), 5)}
            return st.lists(allowed(schema["items"]) if "items" in schema else JSON, **size)
        case "object":
            return _objects(schema)
        case None:
            return JSON
    raise AssertionError(f"no values for {schema}")


def _numbers(schema: dict[str, Any], kind: str) -> st.SearchStrategy[Any]:
    low, high = schema.get("minimum"), schema.get("maximum")
    if kind == "integer":
        low = schema["exclusiveMinimum"] + 1 if "exclusiveMinimum" in schema else low
        high = schema["exclusiveMaximum"] - 1 if "exclusiveMaximum" in schema else high
        small = st.integers(max(low, 0) if low is not None else 0, 8)
        return small | st.integers(low, high)
    exclusive = {
        f"exclude_{end}": f"exclusive{name}" in schema for end, name in (("min", "Minimum"), ("max", "Maximum"))
    }
    low, high = schema.get("exclusiveMinimum", low), schema.get("exclusiveMaximum", high)
    return st.floats(low, high, allow_nan=False, allow_infinity=False, **exclusive)


def _objects(schema: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    properties = {name: allowed(of) for name, of in schema.get("properties", {}).items()}
    required = {name: properties.pop(name) for name in schema.get("required", []) if name in properties}
    fixed = st.fixed_dictionaries(required, optional=properties)
    if not isinstance(schema.get("additionalProperties"), dict):
        return fixed
    names = st.from_regex(schema.get("propertyNames", {}).get("pattern", ""), fullmatch=True)
    more = st.dictionaries(names, allowed(schema["additionalProperties"]), max_size=3)
    return st.tuples(fixed, more).map(lambda pair: {**pair[0], **pair[1]})
