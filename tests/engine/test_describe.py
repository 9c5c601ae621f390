import json
import math
from dataclasses import replace

import pytest

from engine.config import DefaultRope, DynamicRope, LinearRope, Llama3Rope, ModelConfig, YarnRope
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
    qk_norm=False,
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
MISTRAL = {"architectures": ["MistralForCausalLM"]}
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": ["full_attention"] * 2,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
YARN_ROPE = YarnRope(
    theta=10000.0,
    factor=4.0,
    original_max_position=128,
    beta_fast=32.0,
    beta_slow=1.0,
    attention_factor=1.1386294361119891,  # 0.1 ln 4 + 1
    has_whole_bounds=True,
)
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
        # what transformers ignores: Qwen2 and Mistral listen to no bias field, Qwen3 not to mlp_bias
        (
            {"architectures": ["Qwen2ForCausalLM"], "attention_bias": True, "mlp_bias": True},
            {"architecture": "Qwen2ForCausalLM", "qkv_bias": True},
        ),
        (MISTRAL | {"attention_bias": True, "mlp_bias": True}, {"architecture": "MistralForCausalLM"}),
        (MISTRAL | {"max_position_embeddings": 4096}, {"architecture": "MistralForCausalLM", "max_position": 4096}),
        (
            QWEN3 | {"head_dim": 32, "max_window_layers": 1, "layer_types": None, "mlp_bias": True},
            {"architecture": "Qwen3ForCausalLM", "qk_norm": True, "head_dim": 32},
        ),
        (
            QWEN3 | {"attention_bias": True},
            {
                "architecture": "Qwen3ForCausalLM",
                "qk_norm": True,
                "head_dim": 128,
                "qkv_bias": True,
                "output_bias": True,
            },
        ),
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
        ({"rope_scaling": YARN}, YARN_ROPE),
        # as Qwen's model cards say it
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}}, YARN_ROPE),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, replace(YARN_ROPE, original_max_position=512)),
        ({"rope_scaling": {**YARN, "factor": 1}}, replace(YARN_ROPE, factor=1.0, attention_factor=1.0)),
        (
            {"rope_scaling": {**YARN, "beta_fast": 16, "beta_slow": 0.5, "truncate": False, "attention_factor": 2}},
            replace(YARN_ROPE, beta_fast=16.0, beta_slow=0.5, has_whole_bounds=False, attention_factor=2.0),
        ),
        (
            {"rope_scaling": {**YARN, "beta_fast": None, "beta_slow": None, "mscale": 0.5, "attention_factor": None}},
            YARN_ROPE,
        ),
        (
            {"rope_scaling": {**YARN, "factor": math.e**10, "mscale": 3, "mscale_all_dim": 1}},
            replace(YARN_ROPE, factor=math.e**10, attention_factor=2.0),
        ),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            DynamicRope(theta=10000.0, factor=2.0, original_max_position=512),
        ),
        # both forms at once, if they say the same
        (
            {
                "rope_scaling": {"type": "yarn", **YARN},
                "rope_theta": 5.0,
                "rope_parameters": {**YARN, "rope_theta": 10000.0},
            },
            YARN_ROPE,
        ),
    ],
)
def test_rope_in_old_and_new_keys(changes, expected):
    assert describe(tiny_config(**changes)).rope == expected


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"architectures": ["MixtralForCausalLM"]},
            "MixtralForCausalLM .* LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM",
        ),
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
        (
            {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}},
            "rope_type in rope_scaling is 'longrope', expected one of default, linear, llama3, yarn, dynamic",
        ),
        ({"rope_parameters": {"rope_type": ["yarn"] * 99}}, "rope_type in rope_parameters is"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "factor is missing, expected a number from 1"),
        (
            {"head_dim": 2, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "head_dim is 2, expected at least 4",
        ),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 1e9}},
            "factor is 1000000000.0, expected at most 2147483647 positions with 512",
        ),
        ({"rope_scaling": {"type": "yarn"}}, "factor is missing"),
        ({"rope_scaling": {**YARN, "factor": "4"}}, "factor is '4'"),
        ({"rope_scaling": {**YARN, "factor": 1e12}}, "factor is 1000000000000.0, expected at most"),
        (
            {"rope_scaling": {**YARN, "original_max_position_embeddings": 0}},
            "original_max_position_embeddings is 0, expected an integer from 1",
        ),
        ({"rope_scaling": {**YARN, "beta_fast": 0}}, "beta_fast is 0, expected a number"),
        ({"rope_scaling": {**YARN, "beta_slow": float("nan")}}, "beta_slow is nan"),
        ({"rope_scaling": {**YARN, "beta_fast": 1, "beta_slow": 2}}, r"beta_fast is 1.0, expected at least beta_slow"),
        ({"rope_scaling": {**YARN, "attention_factor": 0}}, "attention_factor is 0, expected"),
        ({"rope_scaling": {**YARN, "attention_factor": True}}, "attention_factor is True, expected"),
        ({"rope_scaling": {**YARN, "mscale": -1}}, "mscale is -1"),
        ({"rope_scaling": {**YARN, "mscale_all_dim": "1"}}, "mscale_all_dim is '1'"),
        ({"rope_scaling": {**YARN, "truncate": 0}}, "truncate is 0, expected true or false"),
        ({"rope_theta": 1, "rope_scaling": YARN}, "rope_theta is 1.0, expected more than 1 with yarn"),
        (
            {"rope_scaling": YARN, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
            "rope_scaling is .* expected none beside rope_parameters",
        ),
        (MISTRAL | {"sliding_window": 4096}, "sliding_window is 4096, expected null: sliding-window"),
        (MISTRAL | {"sliding_window": False}, "sliding_window is False, expected null"),
        (
            MISTRAL | {"max_position_embeddings": 4097},
            "sliding_window is missing, expected null: without the field the window is 4096 tokens",
        ),
        (QWEN3 | {"use_sliding_window": True}, "use_sliding_window is True"),
        (QWEN3 | {"head_dim": 0}, "head_dim is 0"),
        (QWEN3 | {"attention_bias": "no"}, "attention_bias is 'no', expected true or false"),
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


@pytest.mark.parametrize(
    ("changes", "longest"),
    [
        ({}, 512),
        ({"rope_scaling": {"type": "linear", "factor": 4}}, 512),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3}}, 512),
        # Qwen2.5 states the length before scaling, DeepSeek the one after, Qwen3 one between
        ({"max_position_embeddings": 128, "rope_scaling": YARN}, 512),
        ({"max_position_embeddings": 512, "rope_scaling": YARN}, 512),
        ({"max_position_embeddings": 160, "rope_scaling": YARN}, 512),
        ({"max_position_embeddings": 600, "rope_scaling": YARN}, 600),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.5}}, 1280),
        ({"max_position_embeddings": 513, "rope_scaling": {"type": "dynamic", "factor": 1.5}}, 769),
    ],
)
def test_longest_context(changes, longest):
    assert describe(tiny_config(**changes)).max_position == longest


def test_a_null_window_is_no_window():
    raw = tiny_config(**MISTRAL, max_position_embeddings=32768) | {"sliding_window": None}
    assert describe(raw).max_position == 32768
