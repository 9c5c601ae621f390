"""Between protobuf messages and the server's own values. Pure functions."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from pydantic_core import from_json

from engine.errors import invalid
from engine.kv.stats import PoolSnapshot
from engine.request import Delta, Finished, Scored, TokenLogprob
from proto.quire.v1 import inference_pb2 as pb
from server.ask import Ask
from server.choices import finish_reason
from server.dialect import AnyText
from server.openai import DEFAULT_MAX_TOKENS, parse_chat, parse_response_format
from server.prompts import Prompt, TextPrompt, TokenPrompt
from server.tools.parser import CallArguments, CallStart, Content, Piece, ToolParser
from server.validation import MAX_LOGPROBS, ScoringFields, parse

if TYPE_CHECKING:
    from engine.info import EngineInfo

OPTIONAL_FIELDS = ("n", "kv_shrink")
OPTIONAL_SAMPLING_FIELDS = (
    "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed",
    "max_tokens",
)  # fmt: skip


def read_prompt(request: pb.GenerateRequest) -> Prompt:
    match request.WhichOneof("prompt"):
        case "text":
            return TextPrompt(request.text)
        case "token_ids":
            return TokenPrompt(list(request.token_ids.ids))
    raise invalid("prompt is required: text or token_ids", "prompt", "missing_required_parameter")


def read_ask(request: pb.GenerateRequest) -> Ask:
    """Raises RequestError."""
    fields = parse(ScoringFields, read_generation(request))
    is_scored = request.HasField("prompt_logprobs")
    if fields.max_tokens == 0 and not is_scored:
        raise invalid("max_tokens must be at least 1 unless prompt_logprobs is given", "max_tokens")
    return Ask(
        model=request.model,
        prompts=(read_prompt(request),),
        prompt_param="prompt",
        fields=fields,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        num_logprobs=_count(request.sampling, "logprobs"),
        num_prompt_logprobs=_count(request, "prompt_logprobs"),
        response=parse_response_format(_response_format(request)),
    )


def read_chat(request: pb.ChatRequest) -> Ask:
    """As the same call over HTTP would be read. Raises RequestError, with the names of HTTP's fields."""
    raw = read_generation(request)
    raw |= {"model": request.model, "messages": read_messages(request.messages)}
    if (num_logprobs := _count(request.sampling, "logprobs")) is not None:
        raw |= {"logprobs": True, "top_logprobs": num_logprobs}
    raw["response_format"] = _response_format(request)
    if request.tools:
        raw["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(request.tools)]
    if request.HasField("tool_choice"):
        name = request.tool_choice
        is_word = name in ("none", "auto", "required")
        raw["tool_choice"] = name if is_word else {"type": "function", "function": {"name": name}}
    if request.HasField("parallel_tool_calls"):
        raw["parallel_tool_calls"] = request.parallel_tool_calls
    if request.HasField("chat_template_kwargs_json"):
        raw["chat_template_kwargs"] = _json(request.chat_template_kwargs_json, "chat_template_kwargs_json")
    return parse_chat(raw).ask


def read_messages(messages: Iterable[pb.ChatMessage]) -> list[dict[str, Any]]:
    """As HTTP has them."""
    raw = []
    for message in messages:
        item: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.tool_calls:
            item["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments_json}}
                for call in message.tool_calls
            ]
        if message.HasField("tool_call_id"):
            item["tool_call_id"] = message.tool_call_id
        raw.append(item)
    return raw


def _response_format(request: pb.GenerateRequest | pb.ChatRequest) -> dict[str, Any] | None:
    match request.response_format.WhichOneof("format"):
        case "json_object":
            return {"type": "json_object"} if request.response_format.json_object else None
        case "json_schema":
            schema = _json(request.response_format.json_schema, "response_format.json_schema")
            return {"type": "json_schema", "json_schema": {"schema": schema}}
    return None


def _tool(tool: pb.Tool, where: str) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    if tool.HasField("parameters_json"):
        function["parameters"] = _json(tool.parameters_json, f"{where}.parameters_json")
    return {"type": "function", "function": function}


def _json(text: str, param: str) -> Any:
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise invalid(f"{param} is not valid JSON: {str(error)[:200]}", param) from None


def _count(message: Any, name: str) -> int | None:
    value: int = getattr(message, name)
    if value > MAX_LOGPROBS:
        raise invalid(f"{name} must be an integer from 0 to {MAX_LOGPROBS}", name)
    return value if message.HasField(name) else None


def read_generation(request: pb.GenerateRequest | pb.ChatRequest) -> dict[str, Any]:
    """What both ways of generating have, as the body of an HTTP request would say it."""
    sampling = request.sampling
    raw: dict[str, Any] = {name: getattr(request, name) for name in OPTIONAL_FIELDS if request.HasField(name)}
    raw |= {name: getattr(sampling, name) for name in OPTIONAL_SAMPLING_FIELDS if sampling.HasField(name)}
    raw["stop"] = list(sampling.stop)
    raw["stop_token_ids"] = list(sampling.stop_token_ids)
    raw["logit_bias"] = dict(sampling.logit_bias)
    raw["min_tokens"] = sampling.min_tokens
    raw["ignore_eos"] = sampling.ignore_eos
    raw["priority"] = request.priority
    return raw


def write_event(index: int, event: Scored | Delta | Finished) -> pb.GenerateResponse:
    match event:
        case Scored(logprobs):
            return pb.GenerateResponse(index=index, prompt_logprobs=map(_logprob, filter(None, logprobs)))
        case Delta(text, token_ids, logprobs):
            return pb.GenerateResponse(index=index, text=text, token_ids=token_ids, logprobs=map(_logprob, logprobs))
        case Finished():
            return pb.GenerateResponse(index=index, finish=_finish(event, event.reason.value))


class ChatWriter:
    """The messages of one answer; `parser` finds its calls."""

    def __init__(self, index: int, parser: ToolParser | AnyText):
        self._index = index
        self._parser = parser

    def write(self, event: Scored | Delta | Finished) -> list[pb.ChatResponse]:
        match event:
            case Delta(text, token_ids, logprobs):
                response = self._response(self._parser.feed(text))
                response.token_ids.extend(token_ids)
                response.logprobs.extend(map(_logprob, logprobs))
                return [response]
            case Finished():
                rest = self._parser.finish()
                reason = finish_reason(event, self._parser.num_calls)
                last = pb.ChatResponse(index=self._index, finish=_finish(event, reason))
                return [self._response(rest), last] if rest else [last]
        return []

    def _response(self, pieces: Iterable[Piece]) -> pb.ChatResponse:
        response = pb.ChatResponse(index=self._index)
        for piece in pieces:
            match piece:
                case Content(text):
                    response.text += text
                case CallStart(index, id, name):
                    response.tool_calls.append(pb.ToolCallDelta(index=index, id=id, name=name))
                case CallArguments(index, text):
                    response.tool_calls.append(pb.ToolCallDelta(index=index, arguments_json=text))
        return response


def _logprob(logprob: TokenLogprob) -> pb.TokenLogprob:
    top = [pb.TopLogprob(token_id=token_id, logprob=value) for token_id, value in logprob.top]
    return pb.TokenLogprob(token_id=logprob.token_id, logprob=logprob.logprob, top=top)


def _finish(finished: Finished, reason: str) -> pb.Finish:
    reasons = {
        "stop": pb.FINISH_REASON_STOP,
        "length": pb.FINISH_REASON_LENGTH,
        "tool_calls": pb.FINISH_REASON_TOOL_CALLS,
    }
    usage = pb.Usage(
        prompt_tokens=finished.usage.num_prompt_tokens,
        cached_tokens=finished.usage.num_cached_tokens,
        generated_tokens=finished.usage.num_generated_tokens,
    )
    finish = pb.Finish(reason=reasons[reason], usage=usage)
    match finished.matched_stop:
        case str(string):
            finish.stop_string = string
        case int(token):
            finish.stop_token_id = token
    return finish


def write_model(info: "EngineInfo") -> pb.GetModelResponse:
    return pb.GetModelResponse(
        model=info.model_name,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        max_num_seqs=info.max_num_seqs,
        kv_format=info.recipe,
        page_tokens=info.page_tokens,
        sink_pages=info.sink_pages,
        bytes_per_token=info.bytes_per_token,
        dtype=info.dtype,
        device=info.device,
    )


def write_pool(snapshot: PoolSnapshot) -> pb.WatchPoolResponse:
    return pb.WatchPoolResponse(
        running=snapshot.num_running,
        waiting=snapshot.num_waiting,
        tiers=[
            pb.Tier(
                name=tier.name,
                total_pages=tier.num_total,
                page_bytes=tier.page_bytes,
                states=[
                    pb.TierState(name=state, pages=num_pages, tokens=tier.tokens.get(state, 0))
                    for state, num_pages in tier.pages.items()
                ],
            )
            for tier in snapshot.tiers
        ],
        counters=snapshot.counters,
    )
