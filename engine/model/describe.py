"""From the `config.json` of a checkpoint to a `ModelConfig`, or one line that says what is wrong with it."""

from typing import Any

from engine.config import DefaultRope, LinearRope, Llama3Rope, ModelConfig, Rope
from engine.errors import StartupError
from engine.request import SamplingDefaults

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM")
ROPE_KINDS = ("default", "linear", "llama3")
# Far above any real model. They keep a damaged file from asking for billions of layers or terabytes of tables.
MAX_SIZE = 2**24
MAX_LAYERS = 1024
MAX_POSITION = 2**31 - 1


def describe(raw: dict[str, Any]) -> ModelConfig:
    """Read a Hugging Face `config.json` that was parsed into `raw`.

    Raises StartupError, naming the field and what was expected, for an architecture, a kind of RoPE or an option that
    is not supported, and for missing, ill-typed or impossible values.
    """
    architecture = _architecture(raw)
    is_qwen2 = architecture == "Qwen2ForCausalLM"
    _refuse_unsupported(raw)

    vocab_size = _integer(raw, "vocab_size")
    hidden_size = _integer(raw, "hidden_size")
    num_heads = _integer(raw, "num_attention_heads")
    num_kv_heads = _integer(raw, "num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise _wrong("num_key_value_heads", num_kv_heads, f"a divisor of num_attention_heads ({num_heads})")
    max_position = _integer(raw, "max_position_embeddings", most=MAX_POSITION)
    attention_bias = _flag(raw, "attention_bias")
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=_integer(raw, "intermediate_size"),
        num_layers=_integer(raw, "num_hidden_layers", most=MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(raw, hidden_size, num_heads),
        rms_norm_eps=_number(raw, "rms_norm_eps", least=0.0, most=1.0),
        max_position=max_position,
        rope=_rope(raw),
        tie_embeddings=_flag(raw, "tie_word_embeddings"),
        # Qwen2 has biases on Q, K and V without saying so, and on nothing else.
        qkv_bias=is_qwen2 or attention_bias,
        output_bias=attention_bias and not is_qwen2,
        mlp_bias=_flag(raw, "mlp_bias") and not is_qwen2,
        eos_token_ids=eos_token_ids(raw.get("eos_token_id"), vocab_size, "config.json"),
    )


def eos_token_ids(value: Any, vocab_size: int, file: str) -> frozenset[int]:
    """The ids in an `eos_token_id` field: one id, a list of them, or null. `file` is named in the error."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for item in ids:
        if not isinstance(item, int) or isinstance(item, bool) or not 0 <= item < vocab_size:
            raise _wrong("eos_token_id", value, f"one or more token ids from 0 to {vocab_size - 1}", file)
    return frozenset(ids)


def sampling_defaults(raw: dict[str, Any], file: str) -> SamplingDefaults:
    """`temperature`, `top_k` and `top_p` of a `generation_config.json`; what it does not state is off."""
    plain = SamplingDefaults()
    top_k = raw.get("top_k")
    return SamplingDefaults(
        temperature=_number(raw, "temperature", least=0.0, most=2.0, default=plain.temperature, file=file),
        top_k=plain.top_k if top_k in (None, 0, -1) else _integer(raw, "top_k", file=file),
        top_p=_number(raw, "top_p", least=1e-6, most=1.0, default=plain.top_p, file=file),
    )


def _architecture(raw: dict[str, Any]) -> str:
    names = raw.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise _wrong("architectures", names, f"a list with one of {', '.join(ARCHITECTURES)}")
    if names[0] not in ARCHITECTURES:
        raise StartupError(
            f"config.json: architecture {names[0]} is not supported; supported: {_listed(ARCHITECTURES)}"
        )
    return names[0]


def _refuse_unsupported(raw: dict[str, Any]) -> None:
    if raw.get("hidden_act", "silu") != "silu":
        raise _wrong("hidden_act", raw["hidden_act"], "'silu'")
    if _flag(raw, "use_sliding_window"):
        raise _wrong("use_sliding_window", True, "false: sliding-window attention is not supported")
    layer_types = raw.get("layer_types") or []
    if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
        raise _wrong("layer_types", layer_types, "'full_attention' for every layer")
    if raw.get("quantization_config") is not None:
        raise StartupError(
            "config.json: field quantization_config is set, expected unquantized weights (float32, bfloat16 or float16)"
        )


def _head_dim(raw: dict[str, Any], hidden_size: int, num_heads: int) -> int:
    if raw.get("head_dim") is None:
        if hidden_size % num_heads:
            raise _wrong("hidden_size", hidden_size, f"a multiple of num_attention_heads ({num_heads}), or a head_dim")
        head_dim = hidden_size // num_heads
    else:
        head_dim = _integer(raw, "head_dim")
    if head_dim % 2:
        raise _wrong("head_dim", head_dim, "an even number, as rotary embedding turns pairs of channels")
    return head_dim


def _rope(raw: dict[str, Any]) -> Rope:
    """Current files keep all of it in `rope_parameters`; older ones have `rope_theta` and maybe `rope_scaling`."""
    name = "rope_parameters" if raw.get("rope_parameters") is not None else "rope_scaling"
    fields = raw.get(name)
    if fields is None:
        fields = {}
    if not isinstance(fields, dict):
        raise _wrong(name, fields, "an object or null")
    if "rope_theta" not in fields:
        fields = {**fields, "rope_theta": raw.get("rope_theta")}
    partial = fields.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial is not None and partial != 1:
        raise _wrong("partial_rotary_factor", partial, "1: rotating only some channels is not supported")

    theta = _number(fields, "rope_theta", least=1.0, default=10000.0)
    kind = fields.get("rope_type", fields.get("type", "default"))
    match kind:
        case "default":
            return DefaultRope(theta=theta)
        case "linear":
            return LinearRope(theta=theta, factor=_number(fields, "factor", least=1.0))
        case "llama3":
            low = _number(fields, "low_freq_factor", least=0.0)
            high = _number(fields, "high_freq_factor", least=0.0)
            if high <= low:
                raise _wrong("high_freq_factor", high, f"more than low_freq_factor ({low})")
            return Llama3Rope(
                theta=theta,
                factor=_number(fields, "factor", least=1.0),
                low_freq_factor=low,
                high_freq_factor=high,
                original_max_position=_integer(fields, "original_max_position_embeddings", most=MAX_POSITION),
            )
    raise StartupError(f"config.json: RoPE type {kind!r} in {name} is not supported; supported: {_listed(ROPE_KINDS)}")


def _integer(
    fields: dict[str, Any],
    name: str,
    *,
    default: int | None = None,
    most: int = MAX_SIZE,
    file: str = "config.json",
) -> int:
    value = fields.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise _wrong(name, value, f"an integer from 1 to {most}", file)
    return value


def _number(
    fields: dict[str, Any],
    name: str,
    *,
    least: float,
    most: float = 1e12,
    default: float | None = None,
    file: str = "config.json",
) -> float:
    value = fields.get(name)
    if value is None and default is not None:
        return default
    # NaN and the infinities, which Python reads from JSON, fail the comparison.
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
        raise _wrong(name, value, f"a number from {least:g} to {most:g}", file)
    return float(value)


def _flag(fields: dict[str, Any], name: str) -> bool:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise _wrong(name, value, "true or false")
    return bool(value)


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names)


def _wrong(field: str, value: Any, expected: str, file: str = "config.json") -> StartupError:
    shown = "missing" if value is None else repr(value)
    # A damaged file can hold anything; the message stays one short line.
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return StartupError(f"{file}: field {field} is {shown}, expected {expected}")
