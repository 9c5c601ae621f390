"""A trial before the server is ready: kernels are compiled, and what does not run or does not fit is known by then."""

from dataclasses import dataclass

import torch

from engine.core import EngineCore
from engine.errors import StartupError
from engine.kv.shrink import Shrink
from engine.request import Request, SamplingParams
from kernels.format.recipe import Recipe

NUM_GENERATED = 3  # the first fills a page, the second begins one


@dataclass(frozen=True, slots=True)
class Trial:
    """One request for a core of its own, over pools that hold nothing yet. Its prompt is a token short of whole pages:
    as many as a step may have, so that the largest activations are met, and enough for a sealed one among them."""

    recipe: Recipe
    max_model_len: int
    max_step_tokens: int
    shrink: Shrink | None

    @property
    def num_prompt_tokens(self) -> int:
        size = self.recipe.page_tokens
        least = self.recipe.sink_pages + self.recipe.window_pages + 2
        most = (self.max_model_len - NUM_GENERATED + 1) // size
        return max(1, min(max(least, self.max_step_tokens // size), most) * size - 1)

    def run(self, core: EngineCore, device_name: str, errors: tuple[type[Exception], ...]) -> None:
        """Raises StartupError where memory is short or one of `errors` is raised: a kernel does not compile or run."""
        sampling = SamplingParams(max_tokens=NUM_GENERATED, temperature=0.0, ignore_eos=True, num_prompt_logprobs=0)
        prompt = (0,) * self.num_prompt_tokens
        core.add([Request(id="trial", prompt=prompt, sampling=sampling, shrink=self.shrink)], [lambda event: None])
        try:
            while not core.is_idle:
                core.step()
        except torch.OutOfMemoryError as error:
            raise StartupError(
                f"--kv-memory leaves {device_name} too little for a step of {self.max_step_tokens} tokens; lower it, "
                "or --max-step-tokens"
            ) from error
        except errors as error:
            reason = next(iter(str(error).splitlines()), "")
            raise StartupError(
                f"--kernels: a step does not run on {device_name} with {self.recipe.name} pages: "
                f"{type(error).__name__}: {reason}; give another --kv-format, --dtype or --page-tokens, or "
                "--kernels torch, which is slow"
            ) from error
