"""lm-eval scores a small task through /v1/completions; its sums are those of models that share no code with the engine
or, behind quantized pages, no attention."""

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.load import load_engine
from engine.model.demo_checkpoint import DEMO_NAME, DemoCheckpoint
from tests.clients.environments import Environments, run
from tests.e2e.servers import PORTS, Server, Start
from tests.engine import plain_model
from tests.engine.oracle_model import log_likelihoods
from tests.model_folders import write_json

pytestmark = pytest.mark.clients
# The version of transformers needs no torch for a tokenizer.
REQUIREMENTS = ("lm_eval[api]>=0.4.9", "transformers")
PAGE = 32
OPTIONS = ("--kv-format", "int4", "--device", "cpu", "--dtype", "float32", "--page-tokens", str(PAGE))
ANSWER = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
TALE = (
    "A fox who had never seen the sea met a gull on the hill above the village. The gull told of waves as tall as "
    "barns, of ships that burn lamps at night, and of sand that is cold before dawn. The fox listened until the stars "
    "were out, and in the morning she packed a loaf of bread and went down to look at the"
)
ROWS = (
    ("The capital of France is", (" Paris", " Rome"), 0),
    ("Two plus two is", (" a dog", " four"), 1),
    ("Water boils at 100 degrees", (" Celsius", " Paris", " yesterday"), 0),
    ("The opposite of hot is", (" cold", " warm and bright"), 0),
    ("naïve café 😀 — a", (" déjà vu", " 漢字"), 0),
    ("Once upon a", (" time", " Tuesday"), 0),
    # The likeliest next token is the end of sequence: the one generated token that lm-eval drops must be there.
    (ANSWER, ("The capital of France is Paris.", "The capital of Spain"), 0),
    (TALE, (" sea", " library"), 0),
)
SCORED = {
    "task": "scored",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{context}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{label}}",
    "target_delimiter": "",
    "metric_list": [{"metric": "acc"}],
}
WRITTEN = {
    "task": "written",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "generate_until",
    "doc_to_text": "{{context}}",
    "doc_to_target": "{{choices[0]}}",
    "generation_kwargs": {"until": ["."], "max_gen_toks": 8},
    "metric_list": [{"metric": "exact_match"}],
}


@pytest.fixture(scope="module")
def exact_server(start: Start) -> Iterator[Server]:
    server = start(DEMO_NAME, *OPTIONS, "--max-model-len", "512", "--max-num-seqs", "4", *PORTS).wait_ready()
    yield server
    server.popen.terminate()
    server.finish()


def write_tokenizer(folder: Path) -> Path:
    """The demo model's, for transformers."""
    folder.mkdir()
    DemoCheckpoint().tokenizer()._backend.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **names})
    return folder


def evaluate(python: Path, server: Server, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The samples of each task."""
    rows = [{"context": context, "choices": choices, "label": label} for context, choices, label in ROWS]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = folder / "tasks"
    tasks.mkdir()
    for task in (SCORED, WRITTEN):
        data = {"dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}}}
        write_json(tasks / f"{task['task']}.yaml", task | data)  # JSON is YAML
    model = {
        "model": DEMO_NAME,
        "base_url": f"{server.http}/v1/completions",
        "tokenizer_backend": "huggingface",
        "tokenizer": write_tokenizer(folder / "tokenizer"),
        "max_length": 512,
        "num_concurrent": 2,
    }
    arguments = ("-m", "lm_eval", "--model", "local-completions", "--tasks", "scored,written", "--batch_size", "4")
    texts = ",".join(f"{name}={value}" for name, value in model.items())
    paths = ("--include_path", tasks, "--output_path", folder / "out", "--log_samples")
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hf")}
    run(python, *arguments, "--model_args", texts, *paths, cwd=folder, **offline)
    samples = {}
    for task in ("scored", "written"):
        (file,) = (folder / "out").rglob(f"samples_{task}_*.jsonl")
        found = [json.loads(line) for line in file.read_text().splitlines()]
        samples[task] = sorted(found, key=lambda sample: sample["doc_id"])
    return samples


def plain_scores() -> Callable[[list[int], int], tuple[float, bool]]:
    """The log-likelihood, in nats, of tokens from an index on, and whether each of them is the likeliest: by a model in
    float64 that knows no pages."""
    checkpoint = DemoCheckpoint()
    config, weight = checkpoint.config, cache(checkpoint.tensor)
    frequencies = [config.rope.theta ** (-2 * pair / config.head_dim) for pair in range(config.head_dim // 2)]

    def score(tokens: list[int], start: int) -> tuple[float, bool]:
        logits = plain_model.logits(config, weight, frequencies, tokens)[start - 1 : -1]
        target = torch.tensor(tokens[start:])[:, None]
        is_greedy = bool((logits.argmax(-1, keepdim=True) == target).all())
        return float(logits.log_softmax(-1).gather(1, target).sum()), is_greedy

    return score


def test_sums_and_texts(environments: Environments, exact_server: Server, tmp_path: Path) -> None:
    samples = evaluate(environments.python("lm-eval", *REQUIREMENTS), exact_server, tmp_path)
    engine = load_engine(
        EngineConfig(model=DEMO_NAME, device="cpu", dtype="float32", kv_format="int4", page_tokens=PAGE),
        lambda done, total: None,
    )
    encode, plain = engine.tokenizer.encode, plain_scores()
    num_quantized = 0
    for (context, choices, label), sample in zip(ROWS, samples["scored"], strict=True):
        start = len(encode(context))
        found = [(float(response[0][0]), str(response[0][1]) == "True") for response in sample["resps"]]
        for choice, (total, is_greedy) in zip(choices, found, strict=True):
            tokens = encode(context + choice)
            if len(tokens) <= PAGE:  # reads no quantized page
                expected, is_likeliest = plain(tokens, start)
                assert is_greedy is is_likeliest, (context, choice)
            else:
                num_quantized += len(tokens) > 2 * PAGE
                expected = sum(log_likelihoods(engine, tokens)[start - 1 :])
            assert abs(total - expected) < 1e-3, (context, choice, total, expected)
        assert sample["acc"] == (max(range(len(found)), key=lambda index: found[index]) == label)
    assert num_quantized == 2
    body = {"model": DEMO_NAME, "prompt": ROWS[-2][0] + ROWS[-2][1][0], "temperature": 0, "max_tokens": 1}
    (choice,) = exact_server.client.post("/v1/completions", json=body).json()["choices"]
    assert choice["finish_reason"] == "stop"  # so that row is what it is there for

    for (context, _, _), sample in zip(ROWS, samples["written"], strict=True):
        body = {"model": DEMO_NAME, "prompt": context, "temperature": 0, "max_tokens": 8, "stop": ["."]}
        answer = exact_server.client.post("/v1/completions", json=body).json()
        assert sample["resps"] == [[answer["choices"][0]["text"]]]
