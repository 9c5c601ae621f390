"""A capacity plan as a picture: gigabytes against context length, a line for each format."""

from math import ceil
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from engine.errors import StartupError
from engine.study.capacity import CapacityPlan
from engine.study.capacity_report import tokens, users

SHORTEST = 1024
NUM_POINTS = 120


def save_plot(plan: CapacityPlan, path: Path) -> None:
    """Write a PNG: the pool that `plan.num_users` sequences need over their length, both axes logarithmic, and the room
    on the GPUs that were asked for. Raises StartupError if the file cannot be written."""
    figure = Figure(figsize=(8, 5.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    first, last = min(SHORTEST, *plan.contexts), max(8 * SHORTEST, *plan.contexts)
    # whole pages, or the lines become stairs
    pages = {ceil(first * (last / first) ** (step / NUM_POINTS) / plan.page_tokens) for step in range(NUM_POINTS + 1)}
    lengths = [count * plan.page_tokens for count in sorted(pages)]
    stored = [(format, format.storage) for format in plan.formats if format.storage]
    for format, storage in sorted(stored, key=lambda pair: -pair[1].bytes_per_token):
        sizes = [storage.pool_bytes(plan.num_users, length) / 1e9 for length in lengths]
        axes.plot(lengths, sizes, linewidth=2, label=f"{format.name} ({format.bits_per_element:.2f} bits)")
    for gpu in plan.asked:
        if gpu.memory:
            axes.axhline(gpu.memory / 1e9, color="black", linewidth=1, linestyle="--")
            label = f"{gpu.gpus.name}: {gpu.memory / 1e9:.0f} GB beside the weights"
            axes.annotate(label, (first, gpu.memory / 1e9), (4, 3), textcoords="offset points", fontsize=9)
    for context in plan.contexts:
        axes.axvline(context, color="grey", linewidth=0.8, linestyle=":", zorder=0)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlim(first, last)
    powers = [2**power for power in range(first.bit_length() - 1, last.bit_length() + 1) if first <= 2**power <= last]
    axes.xaxis.set_major_locator(FixedLocator(powers if len(powers) < 12 else powers[::2]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: tokens(round(value))))
    axes.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.grid(axis="y", alpha=0.3)
    axes.set_xlabel("tokens of each user")
    axes.set_ylabel("GB for K and V")
    axes.set_title(f"{plan.model.name}: the pool for {users(plan.num_users)}")
    axes.legend(loc="lower right")
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise StartupError(
            f"--plot {path}: cannot be written ({error.strerror}); name a file in a folder that is there"
        ) from error
