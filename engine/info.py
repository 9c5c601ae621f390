"""What an engine serves, for those who ask it something."""

from dataclasses import dataclass

from engine.kv.report import PageSizes
from engine.kv.shrink import Shrink
from engine.request import SamplingDefaults


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What the engine serves, after `auto` was resolved. Sizes do not count the null page and slot."""

    model_name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    page_tokens: int
    sink_pages: int
    recipe: str
    dtype: str
    device: str
    num_sealed_pages: int
    num_slots: int
    bytes_per_token: float
    max_num_seqs: int
    max_queued_requests: int
    sampling_defaults: SamplingDefaults
    shrink: Shrink | None
    why_none_is_dropped: str | None
    """The reason that a request may have no shrink hook; None where it may."""
    has_host_memory: bool
    page_sizes: PageSizes
