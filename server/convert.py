"""Between protobuf messages and the server's own values. Pure functions."""

from typing import TYPE_CHECKING, Any

from engine.errors import invalid
from engine.kv.stats import PoolSnapshot
from engine.request import Delta, Finished, FinishReason, Scored, TokenLogprob
from proto.quire.v1 import inference_pb2 as pb
from server.ask import Ask
from server.openai import DEFAULT_MAX_TOKENS
from server.prompts import Prompt, TextPrompt, TokenPrompt
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
    fields = read_fields(request)
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
    )


def _count(message: Any, name: str) -> int | None:
    value: int = getattr(message, name)
    if value > MAX_LOGPROBS:
        raise invalid(f"{name} must be an integer from 0 to {MAX_LOGPROBS}", name)
    return value if message.HasField(name) else None


def read_fields(request: pb.GenerateRequest | pb.ChatRequest) -> ScoringFields:
    """The same fields that JSON would give, checked by the same rules. Raises RequestError."""
    return parse(ScoringFields, read_generation(request))


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
            return pb.GenerateResponse(index=index, finish=_finish(event))


def _logprob(logprob: TokenLogprob) -> pb.TokenLogprob:
    top = [pb.TopLogprob(token_id=token_id, logprob=value) for token_id, value in logprob.top]
    return pb.TokenLogprob(token_id=logprob.token_id, logprob=logprob.logprob, top=top)


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
