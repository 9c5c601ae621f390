"""The bodies of the OpenAI API as models. What several kinds of value may stand for is checked by hand, elsewhere."""

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from server.validation import (
    MAX_LOGPROBS,
    TOKEN_IDS_SCHEMA,
    Fields,
    Flag,
    GenerationFields,
    MaxTokens,
    ScoringFields,
)

MAX_PROMPTS = 64
ROLES = ("system", "developer", "user", "assistant", "tool")
ModelName = Annotated[str, Field(description="the name of the served model")]


class StreamOptions(Fields):
    include_usage: Flag = None
    include_obfuscation: Flag = None


PromptField = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {**TOKEN_IDS_SCHEMA, "minItems": 1},
                {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_PROMPTS},
                {"type": "array", "items": TOKEN_IDS_SCHEMA, "minItems": 1, "maxItems": MAX_PROMPTS},
            ]
        }
    ),
]
StreamOptionsField = Annotated[
    Any, WithJsonSchema({"type": "object", "properties": {"include_usage": {"type": "boolean"}}})
]
MESSAGE_SCHEMA = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": {"enum": list(ROLES)},
        "content": {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "array",
                    "minItems": 1,
                    "items": {
                        "type": "object",
                        "required": ["type", "text"],
                        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                    },
                },
            ]
        },
    },
}
MessagesField = Annotated[
    list[Any],
    Field(min_length=1, description="a list of at least one message"),
    WithJsonSchema({"type": "array", "minItems": 1, "items": MESSAGE_SCHEMA}),
]
ResponseFormatField = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "object",
                    "required": ["type"],
                    "properties": {"type": {"enum": ["text", "json_object"]}},
                },
                {
                    "type": "object",
                    "required": ["type", "json_schema"],
                    "properties": {
                        "type": {"const": "json_schema"},
                        "json_schema": {
                            "type": "object",
                            "required": ["name", "schema"],
                            "properties": {"name": {"type": "string"}, "schema": {"type": "object"}},
                        },
                    },
                },
            ]
        }
    ),
]
FUNCTION_SCHEMA = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string"},
        "description": {"type": "string"},
        "parameters": {"type": "object"},
        "strict": {"type": "boolean"},
    },
}
TOOL_SCHEMA = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {"type": {"const": "function"}, "function": FUNCTION_SCHEMA},
}
ToolsField = Annotated[Any, WithJsonSchema({"type": "array", "items": TOOL_SCHEMA, "maxItems": 128})]
ToolChoiceField = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": ["none", "auto", "required"]},
                {
                    "type": "object",
                    "required": ["type", "function"],
                    "properties": {
                        "type": {"const": "function"},
                        "function": {
                            "type": "object",
                            "required": ["name"],
                            "properties": {"name": {"type": "string"}},
                        },
                    },
                },
            ]
        }
    ),
]
TemplateVariables = Annotated[
    Any,
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": "^[a-z_]+$"},
            "additionalProperties": {"anyOf": [{"type": "string"}, {"type": "number"}, {"type": "boolean"}]},
        }
    ),
]
NumLogprobs = Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS, description=f"an integer from 0 to {MAX_LOGPROBS}")]


class AnswerFields(Fields):
    """What both endpoints take about the form of an answer."""

    model: ModelName
    stream: Flag = None
    stream_options: StreamOptionsField = None
    return_token_ids: Flag = None
    return_tokens_as_token_ids: Flag = None
    response_format: ResponseFormatField = None


class CompletionFields(AnswerFields, ScoringFields):
    prompt: PromptField = None
    logprobs: NumLogprobs = None
    echo: Flag = None


class ChatFields(AnswerFields, GenerationFields):
    messages: MessagesField
    max_completion_tokens: MaxTokens = None
    logprobs: Flag = None
    top_logprobs: NumLogprobs = None
    tools: ToolsField = None
    tool_choice: ToolChoiceField = None
    parallel_tool_calls: Flag = None
    chat_template_kwargs: TemplateVariables = None


class MessageFields(Fields):
    role: Annotated[
        Literal["system", "developer", "user", "assistant", "tool"], Field(description=f"one of {', '.join(ROLES)}")
    ]
    content: Any = None


class TokenizeFields(Fields):
    model: Annotated[str | None, Field(description="the name of the served model")] = None
    prompt: Annotated[str | None, Field(description="a string")] = None
    messages: Annotated[list[Any] | None, Field(min_length=1, description="a list of at least one message")] = None
    add_special_tokens: Flag = None
    return_token_strs: Flag = None


class DetokenizeFields(Fields):
    model: Annotated[str | None, Field(description="the name of the served model")] = None
    tokens: Any
