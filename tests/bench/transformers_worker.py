"""Times transformers' `generate`. Runs in transformers' environment: `python transformers_worker.py FOLDER`.

Reads one JSON object a line, {"prompts": [[ids]], "num_tokens": n}, and answers each with seconds:
{"prefill": to the first token, "decode": a step after it}.
"""

import json
import sys
import time

import torch
import transformers


def main() -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    print(json.dumps(versions | {"threads": torch.get_num_threads()}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        ids = torch.tensor(job["prompts"])
        times = {}
        for count in (1, job["num_tokens"]):
            start = time.perf_counter()
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
            )
            times[count] = time.perf_counter() - start
            assert output.shape == (len(ids), ids.shape[1] + count)
        decode = (times[job["num_tokens"]] - times[1]) / (job["num_tokens"] - 1)
        print(json.dumps({"prefill": times[1], "decode": decode}), flush=True)


if __name__ == "__main__":
    main()
