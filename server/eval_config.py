"""What `quire eval` measures."""

from dataclasses import dataclass
from pathlib import Path

from engine.config import option
from engine.errors import StartupError
from engine.study.probes import PROBES
from kernels.format.named import RECIPE_NAMES

LEAST_PROBE_CONTEXT = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    """The options as given, and the lists in them as values."""

    text: str | None = option(None, "UTF-8 file to measure on (required)", "what is measured")
    context: int = option(8192, "tokens in a window; damage grows with the context", "what is measured")
    windows: int = option(8, "windows, one behind the other from the start of the text", "what is measured")
    kv_format: str = option(
        "int8,int4,fp8_e4m3",
        "KV formats, separated by commas; native is always measured, and first",
        "what is measured",
    )
    kv_recipe: str = option(
        "", "also recipes that quire calibrate wrote: folders, separated by commas", "what is measured"
    )
    probe: str = option("", f"also {' or '.join(PROBES)}, or both separated by a comma", "what is measured")
    probe_depths: int = option(3, "places in the prompt where a probe hides what it asks for", "what is measured")
    probe_repeats: int = option(1, "probes with other text for each length and depth", "what is measured")
    kv_memory: int = option(
        2**30, "memory for which the table says how much fits, as bytes or 2GiB", "what is measured", parse="bytes"
    )
    page_tokens: int = option(64, "tokens in a page: 32, 64 or 128", "engine")
    sink_pages: int = option(1, "first pages of a sequence that stay in 16 bit (native: always 0)", "engine")
    window_pages: int = option(0, "pages before a token's own that are read in 16 bit too (native: 0)", "engine")
    max_step_tokens: int = option(1024, "tokens in one forward pass", "engine")
    device: str = option("auto", "auto, cpu or cuda", "engine")
    dtype: str = option("auto", "auto, float32, bfloat16 or float16", "engine", choices="dtypes")
    json: str | None = option(None, "file for all numbers as JSON", "output")
    resume: str | None = option(
        None, "folder for results so far; the same run goes on from there (default: beside --json)", "output"
    )

    def __post_init__(self) -> None:
        if self.text is None:
            raise StartupError("no text: name a file to measure on, as in --text book.txt")
        bounds = {"windows": 1, "context": 2 * self.page_tokens, "kv_memory": 1, "probe_depths": 1, "probe_repeats": 1}
        for name, least in bounds.items():
            if getattr(self, name) < least:
                flag = "--" + name.replace("_", "-")
                raise StartupError(f"{flag} is {getattr(self, name)}; it must be at least {least}")
        for flag, names, known in (
            ("--kv-format", self.formats, RECIPE_NAMES),
            ("--probe", self.probes, tuple(PROBES)),
        ):
            for name in names:
                if name not in known:
                    raise StartupError(f"{flag} has {name!r}; it must be made of {', '.join(known)}")
        told = [*self.formats, *(Path(folder).resolve().name for folder in self.recipes)]
        if len(set(told)) < len(told):
            raise StartupError(
                "--kv-recipe: folders are told by their names, which must differ from each other and formats"
            )
        if self.probes and self.context < LEAST_PROBE_CONTEXT:
            raise StartupError(f"--context is {self.context}; with --probe it must be at least {LEAST_PROBE_CONTEXT}")

    @property
    def formats(self) -> tuple[str, ...]:
        """The reference, then each format once."""
        return tuple(dict.fromkeys(["native", *_listed(self.kv_format)]))

    @property
    def recipes(self) -> tuple[str, ...]:
        """Folders, each once."""
        return tuple(dict.fromkeys(_listed(self.kv_recipe)))

    @property
    def probes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(_listed(self.probe)))


def _listed(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
