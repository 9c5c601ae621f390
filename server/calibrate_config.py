"""What `quire calibrate` makes, and from what."""

from dataclasses import dataclass

from engine.config import option
from engine.errors import StartupError
from engine.study.candidates import CALIBRATED_NAMES, SEARCH

MAKES = (
    "nuq4, nuq3, nuq2: codebooks for K before RoPE and V (KVQuant). nuq4_rot, nuq3_rot, nuq2_rot: codebooks on rotated "
    "numbers. mixed: codebooks and integers, chosen for each layer under --budget"
)
MOST_BITS = 16  # what nothing but raw pages takes


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateConfig:
    """The options as given."""

    text: str | None = option(None, "UTF-8 file to calibrate on; not the one you measure on (required)", "calibration")
    recipe: str = option("nuq3", MAKES, "calibration")
    budget: float | None = option(
        None, "bits per element of K and V, with all that pages hold; chooses for each layer", "calibration"
    )
    context: int = option(2048, "tokens in a window", "calibration")
    windows: int = option(8, "windows, one behind the other from the start of the text", "calibration")
    search_windows: int = option(2, "of these, how many to measure what each option does", "calibration")
    page_tokens: int = option(64, "tokens in a page: 32, 64 or 128", "recipe")
    sink_pages: int = option(1, "first pages of a sequence that stay in 16 bit", "recipe")
    window_pages: int = option(0, "pages before a token's own that it reads in 16 bit", "recipe")
    marked_tokens: int | None = option(
        None, "tokens of a page that may stay in 16 bit as attention sinks (default: what the text has)", "recipe"
    )
    device: str = option("auto", "auto, cpu or cuda", "engine")

    def __post_init__(self) -> None:
        if self.text is None:
            raise StartupError("no text: name a file to calibrate on, as in --text book.txt")
        if self.recipe not in CALIBRATED_NAMES:
            raise StartupError(f"--recipe is {self.recipe!r}; it must be one of {', '.join(CALIBRATED_NAMES)}")
        if self.recipe == SEARCH and self.budget is None:
            raise StartupError(f"--recipe {SEARCH} needs --budget, as in --budget 3.25")
        if self.budget is not None and not 0 < self.budget <= MOST_BITS:
            raise StartupError(
                f"--budget is {self.budget}; it must be bits per element, at most {MOST_BITS}, as in 3.25"
            )
        if self.page_tokens not in (32, 64, 128):
            raise StartupError(f"--page-tokens is {self.page_tokens}; it must be 32, 64 or 128")
        least_context = (self.sink_pages + 2) * self.page_tokens
        for flag, value, least in (
            ("--sink-pages", self.sink_pages, 0),
            ("--window-pages", self.window_pages, 0),
            ("--windows", self.windows, 1),
            ("--search-windows", self.search_windows, 1),
            ("--context", self.context, least_context),
        ):
            if value < least:
                raise StartupError(f"{flag} is {value}; it must be at least {least}")
        if self.context % self.page_tokens:
            raise StartupError(f"--context is {self.context}; it must be whole pages of {self.page_tokens} tokens")
        if self.marked_tokens is not None and not 0 <= self.marked_tokens <= self.page_tokens:
            raise StartupError(f"--marked-tokens is {self.marked_tokens}; it must be from 0 to {self.page_tokens}")
