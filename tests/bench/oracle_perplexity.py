"""Compares the engine's perplexity of a text with the oracle's, on a real model: they must agree to 0.1 %.

Not a test for 2 bits: there a value next to a rounding boundary falls to the other code when its last bit changes, and
30 layers carry that on, so the engine in other chunks differs from itself by more.

python -m tests.bench.oracle_perplexity MODEL TEXT [--tokens 512] [--formats native,int8,int4]
"""

import argparse
import math
import sys
from statistics import fmean

import torch

from engine.config import EngineConfig
from engine.model.checkpoint import open_checkpoint
from engine.study.driver import Driver
from engine.study.evaluation import Subject
from engine.study.perplexity import compare
from engine.study.windows import read_text, tokenize
from tests.engine.oracle_model import log_likelihoods

MOST = 1e-3


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--formats", default="native,int8,int4")
    parser.add_argument(
        "--dtype", default="float32", help="in 16 bit the order of sums alone moves perplexity by 0.1 %%"
    )
    args = parser.parse_args()
    checkpoint = open_checkpoint(args.model)
    subject = Subject(checkpoint, checkpoint.tokenizer())
    window = tokenize(read_text(args.text), subject.tokenizer, args.tokens, args.text)[: args.tokens]
    worst = 0.0
    for recipe in args.formats.split(","):
        config = EngineConfig(
            model=args.model, kv_format=recipe, dtype=args.dtype, max_num_seqs=1, max_model_len=args.tokens
        )
        engine = subject.build(config)
        driver = Driver(engine, recipe, lambda count: None)
        hidden = driver.prefill(window[:-1], recipe).hidden
        score, _ = compare(driver.logits, hidden, None, torch.tensor(window[1:]))
        expected = fmean(log_likelihoods(engine, window))
        difference = math.expm1(expected - score.log_likelihood)
        worst = max(worst, abs(difference))
        print(f"{recipe}: engine {math.exp(-score.log_likelihood):.4f}, oracle {math.exp(-expected):.4f}", end="")
        print(f", {100 * difference:+.4f} %", flush=True)
    return 0 if worst <= MOST else 1


if __name__ == "__main__":
    sys.exit(main())
