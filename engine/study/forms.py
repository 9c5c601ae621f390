"""What a calibration may choose for K or for V of a layer, and how many bytes that takes. No torch."""

from dataclasses import dataclass, replace

from kernels.format.codec import Codec, Parameters, Quantizer, Store, per_channel, per_token, raw
from kernels.format.layout import PageLayout
from kernels.format.recipe import LayerRecipe, Recipe


@dataclass(frozen=True, slots=True)
class Form:
    """The numbers that a codec sees, and which of them share parameters: all of an option but the codec.

    K: per channel over `group` tokens, before RoPE or after; where it is rotated, each token is divided by its norm
    first, and after RoPE it is balanced with Q. V: per token over `group` channels. None: the page's tokens, the
    head's channels.
    """

    is_key: bool
    is_rotated: bool = False
    before_rope: bool = False
    group: int | None = None
    parameters: Parameters = Parameters.HALF
    clip: float = 1.0

    @property
    def is_balanced(self) -> bool:
        return self.is_key and self.is_rotated and not self.before_rope

    def layer(self, codec: Quantizer) -> LayerRecipe:
        """A layer in which only this one of K and V is quantized."""
        if self.is_key:
            store = per_channel(codec, self.group, self.parameters, self.clip)
            return LayerRecipe(
                store,
                raw(),
                rotate_k=self.is_rotated,
                norm_k=self.is_rotated,
                balance_k=self.is_balanced,
                before_rope=self.before_rope,
            )
        return LayerRecipe(raw(), per_token(codec, self.group, self.parameters, self.clip), rotate_v=self.is_rotated)


@dataclass(frozen=True, slots=True)
class Option:
    """A form and a codec for it."""

    form: Form
    codec: Quantizer

    @property
    def layer(self) -> LayerRecipe:
        return self.form.layer(self.codec)

    @property
    def store(self) -> Store:
        return self.layer.k if self.form.is_key else self.layer.v

    def __str__(self) -> str:
        form = self.form
        return " rotated" * form.is_rotated + " before RoPE" * form.before_rope + f" {self.store}"


def join(k: Option, v: Option) -> LayerRecipe:
    """The layer that stores K and V so."""
    return replace(k.layer, v=v.layer.v, rotate_v=v.layer.rotate_v)


@dataclass(frozen=True, slots=True)
class Geometry:
    """What decides, beside codecs, how large a page is. `dtype`: the model's."""

    num_kv_heads: int
    head_dim: int
    page_tokens: int
    dtype: str = "bfloat16"

    def layout(self, *layers: LayerRecipe) -> PageLayout:
        recipe = Recipe("", layers, self.page_tokens, sink_pages=0)
        return PageLayout(recipe, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, dtype=self.dtype)

    def num_bytes(self, option: Option) -> int:
        """Bytes of K or of V of one layer in a page, token norms included. They add up to those of a page."""
        codes = self.layout(LayerRecipe(raw(), raw())).page_bytes // 2
        return self.layout(option.layer).page_bytes - codes

    def page_bytes(self, bits: float, num_layers: int) -> int:
        """The most bytes that a page of so many bits per element may have."""
        return int(bits * self.num_elements * 2 * num_layers / 8)

    @property
    def num_elements(self) -> int:
        """Of K, or of V, of one layer in a page."""
        return self.num_kv_heads * self.page_tokens * self.head_dim


def bits_of(codec: Codec) -> int:
    """Bits of a code, for tables of results."""
    return 16 if not hasattr(codec, "bits") else int(codec.bits)
