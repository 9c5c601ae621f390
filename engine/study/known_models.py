"""Models that a plan can be made for: their sizes by name, or from a config.json."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config import ModelConfig
from engine.errors import StartupError
from engine.model.demo_checkpoint import DEMO_NAME, DemoCheckpoint
from engine.model.describe import describe
from engine.model.folder import read_json_object
from engine.model.hub import fetch_config, is_hub_name
from engine.model.size import num_parameters


@dataclass(frozen=True, slots=True)
class GroupedHeads:
    """K and V of `num_kv_heads` heads of `head_dim` channels each in a layer."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    has_k_bias: bool

    @property
    def num_elements(self) -> int:
        """Numbers that a token adds to the cache, all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    def __str__(self) -> str:
        return f"{self.num_layers} layers, {self.num_kv_heads} KV heads of {self.head_dim} channels"


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): a layer keeps one compressed vector
    for K and V of all heads, and one rotary key."""

    num_layers: int
    latent_dim: int
    rope_dim: int

    @property
    def num_elements(self) -> int:
        return self.num_layers * (self.latent_dim + self.rope_dim)

    def __str__(self) -> str:
        return f"{self.num_layers} layers with MLA: a latent of {self.latent_dim} and a rotary key of {self.rope_dim}"


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """What a plan needs to know of a model."""

    name: str
    num_parameters: int
    max_position: int
    heads: GroupedHeads | LatentHeads

    @property
    def weight_bytes(self) -> int:
        """In 16 bit."""
        return 2 * self.num_parameters


def find_model(text: str) -> PlannedModel:
    """A model by name, from the path of a config.json or of a folder that holds one, or by its name on a hub, of which
    only config.json is fetched; weights are not looked for.

    Raises StartupError for anything else, with the names, and for a config that does not describe a known model.
    """
    if text.lower() == DEMO_NAME:
        return _from_config(DEMO_NAME, DemoCheckpoint().config)
    if text.lower() in LATENT_MODELS:
        return LATENT_MODELS[text.lower()]
    if text.lower() in GROUPED_MODELS:
        return _from_config(text.lower(), describe(GROUPED_MODELS[text.lower()]))
    path = Path(text)
    if path.is_dir():
        path = path / "config.json"
    if not path.exists() and is_hub_name(text):
        return _from_config(text, describe(read_json_object(fetch_config(text))))
    if not path.is_file():
        names = ", ".join((DEMO_NAME, *GROUPED_MODELS, *LATENT_MODELS))
        shown = text if len(text) <= 200 else text[:200] + "..."
        raise StartupError(
            f"model {shown!r} is not known; expected a config.json, a folder with one, ORG/NAME of a model on the "
            f"Hugging Face hub, or one of {names}"
        )
    config = describe(read_json_object(path))
    return _from_config(path.absolute().parent.name if path.name == "config.json" else path.stem, config)


def _from_config(name: str, config: ModelConfig) -> PlannedModel:
    heads = GroupedHeads(config.num_layers, config.num_kv_heads, config.head_dim, config.has_k_bias)
    return PlannedModel(name, num_parameters(config), config.max_position, heads)


def _llama(layers: int, hidden: int, inner: int, heads: int, kv_heads: int, vocab: int, length: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": length,
        "rms_norm_eps": 1e-5,
    }


GROUPED_MODELS = {
    "llama-3-8b": _llama(32, 4096, 14336, 32, 8, 128256, 8192),
    "llama-3.1-8b": _llama(32, 4096, 14336, 32, 8, 128256, 131072),
    "llama-3-70b": _llama(80, 8192, 28672, 64, 8, 128256, 8192),
    "llama-3.1-70b": _llama(80, 8192, 28672, 64, 8, 128256, 131072),
    "llama-2-7b": _llama(32, 4096, 11008, 32, 32, 32000, 4096),
}
# Quire does not serve these; parameters as their authors state them (arXiv 2405.04434, 2412.19437).
LATENT_MODELS = {
    "deepseek-v2": PlannedModel("deepseek-v2", 236 * 10**9, 131072, LatentHeads(60, 512, 64)),
    "deepseek-v3": PlannedModel("deepseek-v3", 671 * 10**9, 131072, LatentHeads(61, 512, 64)),
}
