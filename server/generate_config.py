"""What `quire generate` is asked for beside the engine's options."""

from dataclasses import dataclass

from engine.config import option


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateConfig:
    """None: as the model's makers want it. Bounds are checked with the request, as for a client's."""

    max_tokens: int | None = option(
        None, "tokens to generate at most (default: until the text ends or the context is full)", "request"
    )
    temperature: float | None = option(
        None, "0 takes the likeliest token each time (default: the model's, else 1)", "request"
    )
    seed: int | None = option(None, "the same seed gives the same text again (default: another each time)", "request")
