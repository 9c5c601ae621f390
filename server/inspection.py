"""The run of `quire inspect`: progress on stderr, a summary on stdout, figures and CSV files in a folder."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from engine.device import choose_device, choose_dtype
from engine.errors import StartupError
from engine.kernel_choice import find_compiled, make_products
from engine.model.checkpoint import Checkpoint, open_checkpoint
from engine.study.axis_error import BITS, FEWEST_TOKENS, Axis, Variant
from engine.study.capture import load_for_capture
from engine.study.distribution import Distribution, Kind
from engine.study.findings import findings
from engine.study.inspection import Inspection, inspect_window
from engine.study.inspection_figures import save_figures
from engine.study.inspection_tables import save_tables, spans, token_text
from engine.study.output_folder import output_folder
from engine.study.windows import read_text
from engine.tokenizer import Tokenizer
from kernels.backend import dtype_name
from server.inspect_config import InspectConfig
from server.terminal import progress_bar, widen

LEAST_WIDTH = 140
MAX_SHOWN_SINKS = 8


def inspect_model(
    model: str, config: InspectConfig, folder: Path, *, force: bool, output: Console, errors: Console
) -> int:
    """Measure, write and print. Returns the exit code; raises StartupError where that cannot work."""
    text = read_text(str(config.text))
    checkpoint = open_checkpoint(model)
    layers = config.chosen_layers(checkpoint.config.num_layers)
    _check(config, checkpoint)
    tokenizer = checkpoint.tokenizer()
    # as a prompt: what the tokenizer puts in front of a text is often the strongest sink
    tokens = tokenizer.encode(text, param="--text")[: config.tokens]
    if len(tokens) < config.tokens:
        raise StartupError(
            f"--text {config.text}: {len(tokens)} tokens; lower --tokens (it is {config.tokens}) or give more text"
        )
    device = choose_device(config.device)
    compiled = find_compiled("auto", device)
    dtype = choose_dtype(config.dtype, device, is_compiled=compiled is not None)
    with output_folder(folder, force=force) as partial:
        with progress_bar(errors) as bar:
            bar.expect(2 * checkpoint.config.num_layers)
            llama = load_for_capture(
                checkpoint,
                max_model_len=checkpoint.config.max_position,
                dtype=dtype,
                device=device,
                make_projection=make_products(compiled),
                progress=lambda done, total: bar.advance("weights", 1),
            )
            found = inspect_window(
                llama, tokens, layers=layers, head=config.head, advance=lambda: bar.advance("K and V", 1)
            )
            bar.advance("figures", 0)
            save_tables(found, tokenizer, partial)
            save_figures(found, checkpoint.name, partial)
        names = sorted(file.name for file in partial.iterdir())
    widen(output, LEAST_WIDTH)
    title = f"{checkpoint.name}, {len(tokens)} tokens of {config.text}, {dtype_name(dtype)} on {device}"
    output.print(title)
    output.print(_kinds(found))
    if found.sinks:
        output.print(_sinks(found, tokenizer))
    output.print(_findings(found, has_k_bias=checkpoint.config.has_k_bias))
    output.print(f"{folder}: {', '.join(names)}")
    return 0


def _check(config: InspectConfig, checkpoint: Checkpoint) -> None:
    model = checkpoint.config
    if not FEWEST_TOKENS <= config.tokens <= model.max_position:
        raise StartupError(
            f"--tokens is {config.tokens}; it must be from {FEWEST_TOKENS} to the {model.max_position} positions that "
            f"{checkpoint.name} was made for"
        )
    if not 0 <= config.head < model.num_kv_heads:
        raise StartupError(f"--head is {config.head}; {checkpoint.name} has KV heads 0 to {model.num_kv_heads - 1}")


def _kinds(found: Inspection) -> Table:
    table = Table(title="error of attention outputs by what shares a scale; means over layers", title_justify="left")
    table.add_column("")
    for axis in Axis:
        for bits in BITS:
            table.add_column(f"per {axis.value}\n{bits} bit", justify="right")
    for header in ("kurtosis\n(normal: 3)", "energy in top\n1 % of channels", "outlier channels\na layer"):
        table.add_column(header, justify="right")
    for kind in Kind:
        items = [item for item in found.distributions if item.kind is kind]
        errors = [found.mean_output_error(Variant(kind, axis, bits)) for axis in Axis for bits in BITS]
        table.add_row(kind.label, *(f"{error:.2%}" for error in errors), *_shape(items))
    return table


def _shape(items: list[Distribution]) -> tuple[str, str, str]:
    kurtosis, energy, outliers = (
        sum(values) / len(items)
        for values in zip(*((item.kurtosis, item.top_energy, item.num_outliers) for item in items), strict=True)
    )
    return f"{kurtosis:.1f}", f"{energy:.0%}", f"{outliers:.1f}"


def _sinks(found: Inspection, tokenizer: Tokenizer) -> Table:
    shown = sorted(found.sinks, key=lambda sink: -sink.ratio)[:MAX_SHOWN_SINKS]
    more = f", the {len(shown)} strongest of {len(found.sinks)}" if len(shown) < len(found.sinks) else ""
    table = Table(title=f"sinks{more}; norms in units of the median token's", title_justify="left")
    for header in ("token", "text", "behind layers", "channel", "|residual|", "x median", "K norm", "V norm"):
        table.add_column(header, justify="left" if header in ("text", "behind layers") else "right")
    table.add_column("attention of\nlater pages", justify="right")
    for sink in shown:
        seen = found.sink_attention(sink)
        table.add_row(
            str(sink.position),
            repr(token_text(tokenizer, found.tokens[sink.position])),
            spans(sink.layers),
            str(sink.channel),
            f"{sink.magnitude:.4g}",
            f"{sink.ratio:.1f}",
            *(("", "", "") if seen is None else (f"{seen.k_norm:.2f}", f"{seen.v_norm:.2f}", f"{seen.received:.1%}")),
        )
    return table


def _findings(found: Inspection, *, has_k_bias: bool) -> Table:
    table = Table(title=f"findings, at {BITS[0]} bits", title_justify="left", show_lines=True)
    for header in ("", "found", "advice"):
        table.add_column(header)
    for finding in findings(found, has_k_bias=has_k_bias):
        table.add_row(finding.question, finding.found, finding.advice)
    return table
