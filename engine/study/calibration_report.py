"""The folder that `quire calibrate` writes: the recipe, the table of sensitivities and its plot."""

import csv
from collections.abc import Sequence
from pathlib import Path

from engine.recipe_file import ModelIdentity, SavedRecipe, write_recipe
from engine.study.calibration import Calibration, Row
from engine.study.forms import bits_of
from engine.study.output_folder import output_folder

SENSITIVITIES = "sensitivities.csv"
PLOT = "sensitivities.png"
HEADER = (
    "layer",
    "part",
    "codec",
    "code_bits",
    "rotated",
    "before_rope",
    "group",
    "parameters",
    "bits_per_element",
    "output_error",
    "loss_nats_per_token",
    "qaq_bits",
    "chosen",
)


def write_folder(folder: Path, calibration: Calibration, model: ModelIdentity, *, force: bool) -> None:
    """Whole or not at all. Raises StartupError where it cannot be written."""
    with output_folder(folder, force=force) as partial:
        write_recipe(partial, SavedRecipe(calibration.recipe, model))
        _write_table(partial / SENSITIVITIES, calibration.rows)
        _draw(partial / PLOT, calibration, model.name)


def _write_table(path: Path, rows: Sequence[Row]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(HEADER)
        for row in rows:
            form, codec = row.option.form, row.option.codec
            writer.writerow(
                (
                    row.layer,
                    "k" if form.is_key else "v",
                    codec,
                    bits_of(codec),
                    int(form.is_rotated),
                    int(form.before_rope),
                    form.group or "",
                    form.parameters.value,
                    f"{row.bits_per_element:.4f}",
                    f"{row.damage.output_error:.4e}",
                    f"{row.damage.loss:.4e}",
                    f"{row.qaq_bits:.2f}",
                    int(row.is_chosen),
                )
            )


def _draw(path: Path, calibration: Calibration, model: str) -> None:
    """Above: what the best option of each width does to the loss in each layer. Below: the size of what was chosen."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 7.5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    num_layers = len(calibration.recipe.layers)
    for colour, bits in enumerate(sorted({bits_of(row.option.codec) for row in calibration.rows}, reverse=True)):
        for is_key, style in ((True, "-"), (False, "--")):
            found = [_least(calibration.rows, layer, is_key, bits) for layer in range(num_layers)]
            if None not in found:
                label = f"{'K' if is_key else 'V'}, {bits}-bit codes"
                above.plot(range(num_layers), found, style, color=f"C{colour}", marker=".", label=label)
    above.set_yscale("log")
    above.margins(y=0.15)  # room for the legend
    above.set_ylabel("estimated loss, nats per token\n(this layer alone, best option)")
    above.grid(alpha=0.3)
    above.legend(ncols=4, fontsize="small")
    above.set_title(
        f"{model}: {calibration.recipe.name}, {calibration.bits_per_element:.2f} bits per element", fontsize="medium"
    )
    chosen = [row for row in calibration.rows if row.is_chosen]
    for is_key, shift in ((True, -0.2), (False, 0.2)):
        mine = [row for row in chosen if row.option.form.is_key is is_key]
        places = [row.layer + shift for row in mine]
        sizes = [row.bits_per_element for row in mine]
        below.bar(places, sizes, width=0.38, label="K" if is_key else "V")
    below.set_ylabel("chosen, bits per element")
    below.set_xlabel("layer")
    below.grid(axis="y", alpha=0.3)
    below.legend(ncols=2, fontsize="small")
    figure.savefig(path, dpi=100)


def _least(rows: Sequence[Row], layer: int, is_key: bool, bits: int) -> float | None:
    found = [
        row.damage.loss
        for row in rows
        if row.layer == layer and row.option.form.is_key is is_key and bits_of(row.option.codec) == bits
    ]
    return min(found, default=None)
