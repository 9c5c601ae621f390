"""Between protobuf messages and the server's own values. Pure functions."""

from typing import TYPE_CHECKING, Any

from engine.errors import invalid
from engine.request import Delta, Finished, FinishReason, Scored
from proto.quire.v1 import inference_pb2 as pb
from server.ask import Ask
from server.openai import DEFAULT_MAX_TOKENS
from server.prompts import Prompt, TextPrompt, TokenPrompt
from server.validation import GenerationFields, parse

if TYPE_CHECKING:
    from engine.engine import EngineInfo

OPTIONAL_FIELDS = ("n", "kv_shrink")
OPTIONAL_SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "seed", "max_tokens")


def read_prompt(request: pb.GenerateRequest) -> Prompt:
    match request.WhichOneof("prompt"):
        case "text":
            return TextPrompt(request.text)
        case "token_ids":
            return TokenPrompt(list(request.token_ids.ids))
    raise invalid("prompt is required: text or token_ids", "prompt", "missing_required_parameter")


def read_ask(request: pb.GenerateRequest) -> Ask:
    """Raises RequestError."""
    return Ask(
        model=request.model,
        prompts=(read_prompt(request),),
        prompt_param="prompt",
        fields=read_fields(request),
        default_max_tokens=DEFAULT_MAX_TOKENS,
    )


def read_fields(request: pb.GenerateRequest) -> GenerationFields:
    """The same fields that JSON would give, checked by the same rules. Raises RequestError."""
    sampling = request.sampling
    raw: dict[str, Any] = {name: getattr(request, name) for name in OPTIONAL_FIELDS if request.HasField(name)}
    raw |= {name: getattr(sampling, name) for name in OPTIONAL_SAMPLING_FIELDS if sampling.HasField(name)}
    raw["stop"] = list(sampling.stop)
    raw["stop_token_ids"] = list(sampling.stop_token_ids)
    raw["ignore_eos"] = sampling.ignore_eos
    raw["priority"] = request.priority
    return parse(GenerationFields, raw)


def write_event(index: int, event: Scored | Delta | Finished) -> pb.GenerateResponse:
    if isinstance(event, Scored):
        return pb.GenerateResponse(index=index)
    if isinstance(event, Delta):
        return pb.GenerateResponse(index=index, text=event.text, token_ids=event.token_ids)
    return pb.GenerateResponse(index=index, finish=_finish(event))


def _finish(finished: Finished) -> pb.Finish:
    reasons = {FinishReason.STOP: pb.FINISH_REASON_STOP, FinishReason.LENGTH: pb.FINISH_REASON_LENGTH}
    usage = pb.Usage(
        prompt_tokens=finished.usage.num_prompt_tokens,
        cached_tokens=finished.usage.num_cached_tokens,
        generated_tokens=finished.usage.num_generated_tokens,
    )
    finish = pb.Finish(reason=reasons[finished.reason], usage=usage)
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
