"""The run of `quire eval`: progress on stderr, a table on stdout, JSON in a file."""

import hashlib
import shutil
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from engine.config import EngineConfig
from engine.device import choose_device, choose_dtype
from engine.errors import StartupError
from engine.kernel_choice import find_compiled
from engine.load import read_recipe_for
from engine.model.checkpoint import Checkpoint, open_checkpoint
from engine.model.identity import identify
from engine.study.evaluation import REFERENCE, Contender, Evaluation, Subject
from engine.study.interval import Interval
from engine.study.probes import ProbePlan
from engine.study.report import FormatReport, report_format, to_json
from engine.study.results import ResultsFolder, write_json
from engine.study.windows import cut_windows, read_text, tokenize
from kernels.backend import dtype_name
from server.eval_config import EvalConfig
from server.terminal import progress_bar, widen

SHORT_CONTEXT = 8192
FEW_WINDOWS = 4
LEAST_WIDTH = 180


def measure(model: str, config: EvalConfig, folder: Path, *, output: Console, errors: Console) -> int:
    """Measure all formats of `config` and print them. Returns the exit code; raises StartupError where that cannot
    work."""
    text = read_text(str(config.text))
    checkpoint = open_checkpoint(model)
    if config.context > checkpoint.config.max_position:
        raise StartupError(
            f"--context is {config.context}; {checkpoint.name} was made for at most {checkpoint.config.max_position} "
            "positions"
        )
    subject = Subject(checkpoint, checkpoint.tokenizer())
    contenders = [Contender(name, _engine_config(model, name, config)) for name in config.formats]
    contenders += [_read_contender(checkpoint, folder, model, config) for folder in config.recipes]
    layouts = [
        subject.layout(contender.config, contender.recipe) for contender in contenders
    ]  # refuses before anything is measured
    tokens = tokenize(text, subject.tokenizer, config.context, str(config.text))
    windows = cut_windows(tokens, config.context, config.windows)
    cases = ProbePlan(config.probes, config.probe_depths, config.probe_repeats).cases(
        tokens, config.context, subject.tokenizer
    )
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device, is_compiled=find_compiled("auto", device) is not None)
    identity = {
        "model": checkpoint.name,
        "model_digest": identify(checkpoint).weights,
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "context": config.context,
        "num_windows": len(windows),
        "dtype": dtype_name(dtype),
        "device": str(device),
        "page_tokens": config.page_tokens,
        "sink_pages": config.sink_pages,
        "window_pages": config.window_pages,
        "max_step_tokens": config.max_step_tokens,
    }
    store = ResultsFolder.open(folder, identity)
    for note in _notes(config, len(windows)):
        errors.print(f"note: {note}")
    with progress_bar(errors) as bar:
        evaluation = Evaluation(subject, windows, cases, store, bar.advance)
        bar.expect(evaluation.num_tokens * len(contenders))
        results = [evaluation.measure(contender) for contender in contenders]
    reports = [
        report_format(result, results[0], layout, cases, context=config.context, kv_memory=config.kv_memory)
        for result, layout in zip(results, layouts, strict=True)
    ]
    study = {**identity, "text": str(config.text), "kv_memory": config.kv_memory, "torch": torch.__version__}
    if config.json is not None:
        write_json(Path(config.json), to_json(study, reports))
        if config.resume is None:
            shutil.rmtree(folder)
    _print_tables(output, study, reports)
    return 0


def _engine_config(model: str, name: str, config: EvalConfig) -> EngineConfig:
    """An engine for one request of the window's length, without `kv_memory`: the pool is then as large as that."""
    return EngineConfig(
        model=model,
        kv_format=name,
        page_tokens=config.page_tokens,
        sink_pages=config.sink_pages,
        window_pages=config.window_pages,
        max_model_len=config.context,
        max_num_seqs=1,
        max_step_tokens=config.max_step_tokens,
        device=config.device,
        dtype=config.dtype,
    )


def _read_contender(checkpoint: Checkpoint, folder: str, model: str, config: EvalConfig) -> Contender:
    """A recipe under its folder's name, if its pages are like those that the other formats are measured with."""
    recipe, name = read_recipe_for(checkpoint, folder), Path(folder).resolve().name
    for flag, mine, theirs in (
        ("--page-tokens", recipe.page_tokens, config.page_tokens),
        ("--sink-pages", recipe.sink_pages, config.sink_pages),
        ("--window-pages", recipe.window_pages, config.window_pages),
    ):
        if mine != theirs:
            raise StartupError(
                f"{flag} is {theirs}, but --kv-recipe {folder} has {mine}; measure all with {flag} {mine}"
            )
    return Contender(name, _engine_config(model, REFERENCE, config), recipe)


def _notes(config: EvalConfig, num_windows: int) -> list[str]:
    notes = []
    if config.context < SHORT_CONTEXT:
        notes.append(f"--context is {config.context}; damage grows with the context, so measure at {SHORT_CONTEXT} too")
    if num_windows < config.windows:
        notes.append(f"the text has {num_windows} windows of {config.context} tokens, not {config.windows}")
    if num_windows == 1:
        notes.append("one window gives no confidence interval")
    elif num_windows < FEW_WINDOWS:
        notes.append(f"intervals over {num_windows} windows say little; take {FEW_WINDOWS} or more")
    return notes


def _print_tables(output: Console, study: dict[str, Any], reports: list[FormatReport]) -> None:
    widen(output, LEAST_WIDTH)
    windows, context, memory = study["num_windows"], study["context"], study["kv_memory"] / 2**30
    title = f"{study['model']}, {windows} x {context} tokens of {study['text']}, {study['dtype']} on {study['device']}"
    output.print(title)
    table = Table()
    for header in (
        "KV format",
        "bits per\nelement",
        f"tokens in\n{memory:.3g} GiB",
        "prefill\ntok/s",
        "decode\ntok/s",
        "perplexity",
        "late half",
        "loss against native\n(95 %)",
        "loss, late half\n(95 %)",
        "KL\nnats",
        "top-1\nequal",
    ):
        table.add_column(header, justify="left" if header == "KV format" else "right")
    for report in reports:
        is_reference = report is reports[0]
        table.add_row(
            report.name,
            f"{report.bits_per_element:.2f}",
            f"{report.num_tokens}",
            f"{report.prefill_tokens_per_second:.0f}",
            f"{report.decode_tokens_per_second:.1f}",
            f"{report.perplexity:.3f}",
            f"{report.late_perplexity:.3f}",
            "" if is_reference else _interval(report.loss_percent),
            "" if is_reference else _interval(report.late_loss_percent),
            "" if is_reference else f"{report.kl:.5f}",
            "" if is_reference else f"{100 * report.agreement:.2f} %",
        )
    output.print(table)
    if reports[0].probes:
        output.print(_probe_table(reports))


def _probe_table(reports: list[FormatReport]) -> Table:
    """Passes of the cases that the reference passes, and the mean log-likelihood of all."""
    table = Table("KV format")
    for score in reports[0].probes:
        table.add_column(f"{score.probe}: passed of\nthose native passes", justify="right")
        if score.log_likelihood is not None:
            table.add_column(f"{score.probe}: log-likelihood\nnats per token", justify="right")
    for report in reports:
        cells = []
        for score in report.probes:
            cells.append(f"{score.num_passed} of {score.num_counted}")
            if score.log_likelihood is not None:
                cells.append(f"{score.log_likelihood:.4f}")
        table.add_row(report.name, *cells)
    return table


def _interval(loss: Interval) -> str:
    if loss.low is None or loss.high is None:
        return f"{loss.mean:+.2f} %"
    return f"{loss.mean:+.2f} % ({loss.low:+.2f} to {loss.high:+.2f})"
