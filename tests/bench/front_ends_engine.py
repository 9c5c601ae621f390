"""The engine of `bench-front-ends` without front ends, in a process of its own.

Reads lines with a JSON object: `prompts`, texts to continue at once by `num_tokens` each. Answers each with a line.
"""

import asyncio
import json
import sys
import time

from engine.config import EngineConfig
from engine.engine import Engine
from engine.load import load_engine
from engine.model.demo_checkpoint import DEMO_NAME
from engine.request import Delta, Event, Finished, Request, SamplingParams

FORMAT = "int4"


async def run(engine: Engine, prompts: list[str], num_tokens: int) -> dict[str, float]:
    heard: asyncio.Queue[Event] = asyncio.Queue()
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    ids = [tuple(engine.tokenizer.encode(prompt)) for prompt in prompts]
    cpu, began = time.process_time(), time.monotonic()
    for number, prompt in enumerate(ids):
        engine.submit([Request(id=str(number), prompt=prompt, sampling=sampling)], [heard.put_nowait])
    first: float | None = None
    num_running = len(prompts)
    while num_running:
        event = await heard.get()
        if isinstance(event, Delta) and first is None:
            first = time.monotonic() - began
        num_running -= isinstance(event, Finished)
    assert first is not None
    return {
        "cpu_seconds": time.process_time() - cpu,
        "num_tokens": len(prompts) * num_tokens,
        "first_token_seconds": first,
    }


def main() -> None:
    engine = load_engine(EngineConfig(model=DEMO_NAME, kv_format=FORMAT), lambda done, total: None)
    engine.start()
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(asyncio.run(run(engine, **json.loads(line)))), flush=True)
    engine.stop()


if __name__ == "__main__":
    main()
