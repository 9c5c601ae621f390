import json
from dataclasses import replace

import pytest

from engine.config import DefaultRope, LinearRope, Llama3Rope, ModelConfig
from engine.errors import StartupError
from engine.model.describe import describe
from tests.model_folders import tiny_config

TINY = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=258,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    rms_norm_eps=1e-5,
    max_position=512,
    rope=DefaultRope(theta=10000.0),
    tie_embeddings=True,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    eos_token_ids=frozenset({257}),
)
LLAMA3 = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA3_ROPE = Llama3Rope(
    theta=500000.0, factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192
)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {}),
        ({"num_key_value_heads": None}, {"num_kv_heads": 4}),
        ({"head_dim": 32}, {"head_dim": 32}),
        ({"tie_word_embeddings": None}, {"tie_embeddings": False}),
        ({"attention_bias": True}, {"qkv_bias": True, "output_bias": True}),
        ({"mlp_bias": True}, {"mlp_bias": True}),
        ({"eos_token_id": [1, 2, 2]}, {"eos_token_ids": frozenset({1, 2})}),
        ({"eos_token_id": None}, {"eos_token_ids": frozenset()}),
        (
            {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False, "sliding_window": 4096},
            {"architecture": "Qwen2ForCausalLM", "qkv_bias": True},
        ),
        ({"layer_types": ["full_attention"] * 2}, {}),
        ({"rms_norm_eps": 1}, {"rms_norm_eps": 1.0}),
    ],
)
def test_fields(changes, expected):
    assert describe(tiny_config(**changes)) == replace(TINY, **expected)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_theta": None}, DefaultRope(theta=10000.0)),
        ({"rope_theta": 5e5}, DefaultRope(theta=5e5)),
        ({"rope_scaling": {"type": "linear", "factor": 4}}, LinearRope(theta=10000.0, factor=4.0)),
        ({"rope_scaling": {"rope_type": "default"}}, DefaultRope(theta=10000.0)),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}, LLAMA3_ROPE),
        (
            {"rope_theta": None, "rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3}},
            LLAMA3_ROPE,
        ),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 1e6}}, DefaultRope(theta=1e6)),
        ({"partial_rotary_factor": 1.0}, DefaultRope(theta=10000.0)),
    ],
)
def test_rope_in_old_and_new_keys(changes, expected):
    assert describe(tiny_config(**changes)).rope == expected


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM .* LlamaForCausalLM, Qwen2ForCausalLM"),
        ({"architectures": None}, "architectures is missing"),
        ({"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM', expected a list"),
        ({"vocab_size": None}, "vocab_size is missing, expected an integer"),
        ({"hidden_size": "16"}, "hidden_size is '16', expected an integer"),
        ({"hidden_size": 16.0}, "hidden_size is 16.0"),
        ({"num_attention_heads": True}, "num_attention_heads is True"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, expected an integer from 1 to 1024"),
        ({"vocab_size": 10**30}, "vocab_size is 10+, expected"),
        ({"max_position_embeddings": -1}, "max_position_embeddings is -1"),
        ({"num_key_value_heads": 3}, r"num_key_value_heads is 3, expected a divisor of num_attention_heads \(4\)"),
        ({"num_attention_heads": 3, "num_key_value_heads": 3}, "hidden_size is 16, expected a multiple"),
        ({"head_dim": 5}, "head_dim is 5, expected an even"),
        ({"rms_norm_eps": None}, "rms_norm_eps is missing"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', expected 'silu'"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes', expected true or false"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config is set"),
        ({"eos_token_id": 258}, "eos_token_id is 258, expected one or more token ids from 0 to 257"),
        ({"eos_token_id": [1, "2"]}, "eos_token_id is"),
        ({"rope_theta": float("inf")}, "rope_theta is inf"),
        ({"rope_theta": 10**400}, "rope_theta is 1000"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn' in rope_scaling .* default, linear, llama3"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "'dynamic' in rope_parameters"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear', expected an object"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor is 0.5"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor is 1.0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}}, "partial_rotary_factor is 0.25"),
    ],
)
def test_refusals_name_the_field_in_one_line(changes, says):
    # Through JSON, as a file would bring it: NaN and Infinity pass Python's parser.
    raw = json.loads(json.dumps(tiny_config(**changes)))
    with pytest.raises(StartupError, match=says) as caught:
        describe(raw)
    message = str(caught.value)
    assert message.startswith("config.json: ")
    assert "\n" not in message
    assert len(message) < 250
