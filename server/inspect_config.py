"""What `quire inspect` looks at."""

from dataclasses import dataclass

from engine.config import option
from engine.errors import StartupError

MOST_LAYERS = 8
SPREAD = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectConfig:
    """The options as given. `layers`, `head` and `tokens` are checked against the model by whoever knows it."""

    text: str | None = option(
        None, "UTF-8 file; its first tokens are what the model reads (required)", "what is measured"
    )
    tokens: int = option(1024, "tokens of the text, at least 192", "what is measured")
    layers: str | None = option(
        None,
        f"layers to draw, as in 0,3,15: at most {MOST_LAYERS} (default: {SPREAD} spread over the model)",
        "figures",
    )
    head: int = option(0, "KV head to draw", "figures")
    device: str = option("auto", "auto, cpu or cuda", "engine")
    dtype: str = option(
        "float32", "auto, float32, bfloat16 or float16; statistics are fp32", "engine", choices="dtypes"
    )

    def __post_init__(self) -> None:
        if self.text is None:
            raise StartupError("no text: name a file for the model to read, as in --text book.txt")

    def chosen_layers(self, num_layers: int) -> tuple[int, ...]:
        """Ascending, each once. Raises StartupError for what is no layer of a model with so many."""
        if self.layers is None:
            last = num_layers - 1
            return tuple(sorted({round(last * step / (SPREAD - 1)) for step in range(SPREAD)}))
        chosen = set()
        for item in self.layers.split(","):
            word = item.strip()
            if not (word.isascii() and word.isdecimal() and len(word) < 9 and int(word) < num_layers):
                raise StartupError(f"--layers has {word!r}; it must be made of numbers from 0 to {num_layers - 1}")
            chosen.add(int(word))
        if len(chosen) > MOST_LAYERS:
            raise StartupError(f"--layers has {len(chosen)} layers; at most {MOST_LAYERS} fit in a figure")
        return tuple(sorted(chosen))
