"""From the `config.json` of a checkpoint to a `ModelConfig`, or one line that says what is wrong with it."""

from dataclasses import dataclass
from typing import Any

from engine.config import ModelConfig
from engine.errors import StartupError
from engine.model.describe_rope import describe_rope, longest_context
from engine.model.fields import MAX_LAYERS, MAX_POSITION, read_flag, read_integer, read_number, wrong_field
from engine.request import SamplingDefaults


@dataclass(frozen=True, slots=True, kw_only=True)
class _Architecture:
    """What an architecture has without a field that says so, and which fields it listens to."""

    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    reads_attention_bias: bool = False
    reads_mlp_bias: bool = False
    head_dim: int | None = None
    """Where no field states it; None: hidden_size / num_attention_heads."""
    window: int | None = None
    """The tokens of its sliding window where no field states any."""


ARCHITECTURES = {
    "LlamaForCausalLM": _Architecture(reads_attention_bias=True, reads_mlp_bias=True),
    "MistralForCausalLM": _Architecture(window=4096),
    "Qwen2ForCausalLM": _Architecture(has_qkv_bias=True),
    "Qwen3ForCausalLM": _Architecture(reads_attention_bias=True, has_qk_norm=True, head_dim=128),
}


def describe(raw: dict[str, Any]) -> ModelConfig:
    """Read a Hugging Face `config.json` that was parsed into `raw`.

    Raises StartupError, naming the field and what was expected, for an architecture, a kind of RoPE or an option that
    is not supported, and for missing, ill-typed or impossible values.
    """
    name = _architecture(raw)
    architecture = ARCHITECTURES[name]
    _refuse_unsupported(raw)

    vocab_size = read_integer(raw, "vocab_size")
    hidden_size = read_integer(raw, "hidden_size")
    num_heads = read_integer(raw, "num_attention_heads")
    num_kv_heads = read_integer(raw, "num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise wrong_field("num_key_value_heads", num_kv_heads, f"a divisor of num_attention_heads ({num_heads})")
    max_position = read_integer(raw, "max_position_embeddings", most=MAX_POSITION)
    head_dim = _head_dim(raw, architecture.head_dim, hidden_size, num_heads)
    rope = describe_rope(raw, head_dim=head_dim, max_position=max_position)
    longest = longest_context(rope, max_position)
    if architecture.window is not None:
        _refuse_window(raw, architecture.window, longest)
    attention_bias = read_flag(raw, "attention_bias") and architecture.reads_attention_bias
    return ModelConfig(
        architecture=name,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=read_integer(raw, "intermediate_size"),
        num_layers=read_integer(raw, "num_hidden_layers", most=MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=read_number(raw, "rms_norm_eps", least=0.0, most=1.0),
        max_position=longest,
        rope=rope,
        tie_embeddings=read_flag(raw, "tie_word_embeddings"),
        qkv_bias=architecture.has_qkv_bias or attention_bias,
        qk_norm=architecture.has_qk_norm,
        output_bias=attention_bias,
        mlp_bias=read_flag(raw, "mlp_bias") and architecture.reads_mlp_bias,
        eos_token_ids=eos_token_ids(raw.get("eos_token_id"), vocab_size, "config.json"),
    )


def eos_token_ids(value: Any, vocab_size: int, file: str) -> frozenset[int]:
    """The ids in an `eos_token_id` field: one id, a list of them, or null. `file` is named in the error."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for item in ids:
        if not isinstance(item, int) or isinstance(item, bool) or not 0 <= item < vocab_size:
            raise wrong_field("eos_token_id", value, f"one or more token ids from 0 to {vocab_size - 1}", file)
    return frozenset(ids)


def sampling_defaults(raw: dict[str, Any], file: str) -> SamplingDefaults:
    """`temperature`, `top_k` and `top_p` of a `generation_config.json`; what it does not state is off."""
    plain = SamplingDefaults()
    top_k = raw.get("top_k")
    return SamplingDefaults(
        temperature=read_number(raw, "temperature", least=0.0, most=2.0, default=plain.temperature, file=file),
        top_k=plain.top_k if top_k in (None, 0, -1) else read_integer(raw, "top_k", file=file),
        top_p=read_number(raw, "top_p", least=1e-6, most=1.0, default=plain.top_p, file=file),
    )


def _architecture(raw: dict[str, Any]) -> str:
    names = raw.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise wrong_field("architectures", names, f"a list with one of {', '.join(ARCHITECTURES)}")
    if names[0] not in ARCHITECTURES:
        raise StartupError(
            f"config.json: architecture {names[0]} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    return names[0]


def _refuse_unsupported(raw: dict[str, Any]) -> None:
    if raw.get("hidden_act", "silu") != "silu":
        raise wrong_field("hidden_act", raw["hidden_act"], "'silu'")
    if read_flag(raw, "use_sliding_window"):
        raise wrong_field("use_sliding_window", True, "false: sliding-window attention is not supported")
    layer_types = raw.get("layer_types") or []
    if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
        raise wrong_field("layer_types", layer_types, "'full_attention' for every layer")
    if raw.get("quantization_config") is not None:
        raise StartupError(
            "config.json: field quantization_config is set, expected unquantized weights (float32, bfloat16 or float16)"
        )


def _refuse_window(raw: dict[str, Any], default: int, longest: int) -> None:
    """`sliding_window` must be null, or missing where the `default` window that this means is never left."""
    name = "sliding_window"
    if name not in raw and longest > default:
        raise wrong_field(name, None, f"null: without the field the window is {default} tokens, which is not supported")
    if raw.get(name) is not None:
        raise wrong_field(name, raw[name], "null: sliding-window attention is not supported")


def _head_dim(raw: dict[str, Any], default: int | None, hidden_size: int, num_heads: int) -> int:
    if raw.get("head_dim") is not None:
        head_dim = read_integer(raw, "head_dim")
    elif default is not None:
        head_dim = default
    else:
        if hidden_size % num_heads:
            raise wrong_field(
                "hidden_size", hidden_size, f"a multiple of num_attention_heads ({num_heads}), or a head_dim"
            )
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise wrong_field("head_dim", head_dim, "an even number, as rotary embedding turns pairs of channels")
    return head_dim
