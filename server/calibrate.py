"""The run of `quire calibrate`: progress on stderr, what was found on stdout, a folder."""

from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.table import Table

from engine.config import ModelConfig
from engine.device import choose_device
from engine.errors import StartupError
from engine.model.checkpoint import open_checkpoint
from engine.model.identity import identify
from engine.study.calibration import Calibration, Calibrator, Wish
from engine.study.calibration_report import write_folder
from engine.study.candidates import searched, uniform
from engine.study.output_folder import check_output
from engine.study.sink_rule import SinkFinding
from engine.study.windows import cut_windows, read_text, tokenize
from server.calibrate_config import CalibrateConfig
from server.terminal import progress_bar


def calibrate(
    model: str, config: CalibrateConfig, folder: Path, *, force: bool, output: Console, errors: Console
) -> int:
    """Make the recipe and write its folder. Returns the exit code; raises StartupError where that cannot work."""
    check_output(folder, force=force)
    text = read_text(str(config.text))
    checkpoint = open_checkpoint(model)
    if config.context > checkpoint.config.max_position:
        raise StartupError(
            f"--context is {config.context}; {checkpoint.name} was made for at most {checkpoint.config.max_position} "
            "positions"
        )
    wish = _wish(config, checkpoint.config)
    tokens = tokenize(text, checkpoint.tokenizer(), config.context, str(config.text))
    windows = cut_windows(tokens, config.context, config.windows)
    if len(windows) < config.windows:
        errors.print(f"note: the text has {len(windows)} windows of {config.context} tokens")
    with progress_bar(errors) as bar:
        calibrator = Calibrator(checkpoint, windows, wish, choose_device(config.device), bar.advance)
        bar.expect(calibrator.num_units)
        calibration = calibrator.run()
    write_folder(folder, calibration, identify(checkpoint), force=force)
    _show(calibration, output, folder)
    return 0


def _wish(config: CalibrateConfig, model: ModelConfig) -> Wish:
    is_searched = config.budget is not None
    if is_searched:
        candidates = searched(config.recipe, head_dim=model.head_dim)
    else:
        candidates = uniform(config.recipe, has_k_bias=model.has_k_bias, head_dim=model.head_dim)
    return Wish(
        name=f"{config.recipe}@{config.budget:g}" if is_searched else config.recipe,
        candidates=candidates,
        budget=config.budget,
        page_tokens=config.page_tokens,
        sink_pages=config.sink_pages,
        window_pages=config.window_pages,
        marked_tokens=config.marked_tokens,
        search_windows=config.search_windows,
    )


def _show(calibration: Calibration, output: Console, folder: Path) -> None:
    table = Table("K or V", "stored", "layers", "estimated loss\nnats per token")
    chosen = [row for row in calibration.rows if row.is_chosen]
    for is_key in (True, False):
        mine = [row for row in chosen if row.option.form.is_key is is_key]
        for name, count in Counter(str(row.option).strip() for row in mine).most_common():
            loss = sum(row.damage.loss for row in mine if str(row.option).strip() == name)
            table.add_row("K" if is_key else "V", name, str(count), f"{loss:.2e}")
    table.add_section()
    table.add_row("", "all", "", f"{sum(row.damage.loss for row in chosen):.2e}")
    output.print(table)
    output.print(_sinks(calibration.sinks, calibration.recipe.sink_rule is not None), soft_wrap=True)
    bits = f"{calibration.recipe.name}: {calibration.bits_per_element:.2f} bits per element"
    output.print(f"{bits}; take it with --kv-recipe {folder}", soft_wrap=True)


def _sinks(found: SinkFinding | None, is_used: bool) -> str:
    if found is None:
        return "sinks: no token stands out in the residual stream; the recipe has no rule for them"
    rule = found.rule
    channels = ", ".join(map(str, rule.channels))
    text = (
        f"sinks: behind layer {rule.layer} channel {channels} passes {rule.threshold:.4g} for {found.num_marked} of "
        f"{found.num_tokens} tokens, {found.num_outside} of them behind the sink pages"
    )
    if not is_used:
        return text + "; the recipe has no rule for them"
    layers = f"{found.layers[0]} to {found.layers[-1]}" if found.layers else "none"
    return text + f"; layers {layers} keep them in 16 bit"
