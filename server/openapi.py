"""GET /openapi.json: the HTTP interface as an OpenAPI 3.1 document, from the models that check requests."""

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from server.fields import ChatFields, CompletionFields, DetokenizeFields, TokenizeFields
from server.pool_map import MAX_ID_CHARS

ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}
POSTS: dict[str, tuple[type[BaseModel], str]] = {
    "/v1/completions": (CompletionFields, "Continue prompts; special tokens written in them are parsed."),
    "/v1/chat/completions": (ChatFields, "Answer a conversation through the model's chat template."),
    "/tokenize": (TokenizeFields, "Text or messages to token ids."),
    "/detokenize": (DetokenizeFields, "Token ids to text."),
}
GETS = {
    "/": "The pool page, which shows all this in a browser; needs no key itself.",
    "/v1/models": "The served model.",
    "/v1/models/{name}": "The served model, by name.",
    "/tokenizer_info": "Special tokens and the chat template.",
    "/v1/pool": "The KV pool; `check=true` proves that every page is accounted for.",
    "/v1/pool/events": "The KV pool again and again, as server-sent events, every `interval_ms`; with `map=true` each "
    "has the pool map, too.",
    "/v1/pool/map": "The KV pool in detail: each page, the prefix tree, running requests; at most two seconds old.",
    "/health": "Whether requests are taken.",
    "/health/ready": "Whether requests are taken.",
    "/health/live": "Whether the process answers; needs no key.",
    "/metrics": "Metrics for Prometheus.",
    "/version": "The program's version.",
    "/openapi.json": "This document.",
}
SELECTED = {
    "name": "request",
    "in": "query",
    "description": "A running request whose pages are listed.",
    "schema": {"type": "string", "maxLength": MAX_ID_CHARS},
}
PARAMETERS = {
    "/v1/models/{name}": [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}],
    "/v1/pool": [{"name": "check", "in": "query", "schema": {"enum": ["true", "false"]}}],
    "/v1/pool/events": [
        {"name": "interval_ms", "in": "query", "schema": {"type": "integer", "minimum": 100, "maximum": 60_000}},
        {"name": "map", "in": "query", "schema": {"enum": ["true", "false"]}},
        SELECTED,
    ],
    "/v1/pool/map": [SELECTED],
}


def document(version: str) -> dict[str, Any]:
    models = [(model, "validation") for model, _ in POSTS.values()]
    _, schemas = models_json_schema(models, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    paths: dict[str, Any] = {}
    for path, (model, summary) in POSTS.items():
        body = {"content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}}
        paths[path] = {
            "post": {"summary": summary, "requestBody": {"required": True, **body}, "responses": _responses()}
        }
    for path, summary in GETS.items():
        paths[path] = {"get": {"summary": summary, "parameters": PARAMETERS.get(path, []), "responses": _responses()}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Quire", "version": version},
        "security": [{}, {"key": []}],
        "paths": paths,
        "components": {
            "schemas": {**schemas["$defs"], "Error": ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _responses() -> dict[str, Any]:
    error = {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}
    return {"200": {"description": "The answer."}, "default": {"description": "What was wrong.", **error}}
