"""A capacity plan as tables and as JSON (documented in docs/capacity.md)."""

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from engine.study.capacity import CapacityPlan, Format, GpuPlan

VERSION = 1
NO_ROOM = "no room"


def show(plan: CapacityPlan, console: Console) -> None:
    """Print the plan for people."""
    model = plan.model
    console.print(
        f"{model.name}: {model.heads}; {model.num_parameters / 1e6:,.0f} million parameters, "
        f"{gigabytes(model.weight_bytes)} GB in 16 bit\n",
    )
    console.print(_formats_table(plan))
    console.print(_gpus_table(plan))
    if any(gpu.prescriptions for gpu in plan.asked):
        console.print(_prescriptions_table(plan))
    notes = list(plan.notes)
    if not all(gpu.memory for gpu in (*plan.asked, *plan.cards)):
        notes.append(f"{NO_ROOM}: the weights alone are larger than the memory.")
    for note in notes:
        console.print(f"- {note}")


def as_json(plan: CapacityPlan) -> dict[str, Any]:
    """The plan as a JSON object; sizes are whole bytes, contexts tokens."""
    return {
        "version": VERSION,
        "model": {
            "name": plan.model.name,
            "num_parameters": plan.model.num_parameters,
            "weight_bytes": plan.model.weight_bytes,
            "max_position": plan.model.max_position,
            "elements_per_token": plan.model.heads.num_elements,
        },
        "page_tokens": plan.page_tokens,
        "sink_pages": plan.sink_pages,
        "num_users": plan.num_users,
        "formats": [_format_json(plan, format) for format in plan.formats],
        "gpus": [_gpu_json(gpu) for gpu in plan.asked],
        "cards": [_gpu_json(gpu) for gpu in plan.cards],
        "notes": list(plan.notes),
    }


def _format_json(plan: CapacityPlan, format: Format) -> dict[str, Any]:
    storage = format.storage
    sizes = [
        {
            "context": context,
            "user_bytes": round(context * storage.bytes_per_token),
            "pool_bytes_one_user": storage.pool_bytes(1, context),
            "pool_bytes": storage.pool_bytes(plan.num_users, context),
        }
        for context in plan.contexts
        if storage
    ]
    return {
        "name": format.name,
        "is_served": storage is not None,
        "bits_per_element": format.bits_per_element,
        "bytes_per_token": storage.bytes_per_token if storage else None,
        "sizes": sizes,
    }


def _gpu_json(gpu: GpuPlan) -> dict[str, Any]:
    return {
        "name": gpu.gpus.name,
        "count": gpu.gpus.count,
        "generation": gpu.gpus.card.generation.value,
        "memory_bytes": gpu.gpus.num_bytes,
        "kv_bytes": gpu.memory,
        "fits": [
            {"format": name, "context": context, "num_users": users}
            for name, by_context in gpu.users.items()
            for context, users in by_context.items()
        ],
        "prescriptions": [
            {"context": context, "format": choice.recipe, "num_users": choice.num_full, "reason": choice.reason}
            for context, choice in gpu.prescriptions.items()
        ],
    }


def gigabytes(num_bytes: float) -> str:
    """In 10^9 bytes, with two decimals, or with three digits that count where it is little."""
    value = num_bytes / 1e9
    return f"{value:,.2f}" if value >= 0.1 else f"{value:.3g}"


def tokens(count: int) -> str:
    """`32k`, `1M` or the plain number."""
    for unit, size in (("M", 1024**2), ("k", 1024)):
        if count % size == 0:
            return f"{count // size}{unit}"
    return str(count)


def users(count: int) -> str:
    return "1 user" if count == 1 else f"{count} users"


def _table(title: str, *columns: str, left: int = 1) -> Table:
    """The first `left` columns hold words, the others numbers."""
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < left else "right", vertical="bottom")
    return table


def _formats_table(plan: CapacityPlan) -> Table:
    table = _table(
        "K and V, in GB",
        "format",
        "bits per\nelement",
        "bytes per\ntoken",
        "context",
        "1 user,\ntokens alone",
        f"pool for\n{users(plan.num_users)}",
    )
    for format in plan.formats:
        storage = format.storage
        if storage is None:
            table.add_row(format.name, "not served", end_section=True)
            continue
        first = (format.name, f"{format.bits_per_element:.2f}", f"{storage.bytes_per_token:,.0f}")
        for context in plan.contexts:
            table.add_row(
                *(first if context == plan.contexts[0] else ("", "", "")),
                tokens(context),
                gigabytes(context * storage.bytes_per_token),
                gigabytes(storage.pool_bytes(plan.num_users, context)),
                end_section=context == plan.contexts[-1],
            )
    return table


def _gpus_table(plan: CapacityPlan) -> Table:
    contexts = " / ".join(tokens(context) for context in plan.contexts)
    table = _table(
        f"Users at once with {contexts} tokens each (bold: {plan.num_users} or more)",
        "GPU",
        "GB",
        "GB for\nK and V",
        *(format.name for format in plan.formats),
    )
    table.add_column("auto takes", vertical="bottom")
    named = {gpu.gpus for gpu in plan.asked}
    rows = (*plan.asked, *(gpu for gpu in plan.cards if gpu.gpus not in named))
    for index, gpu in enumerate(rows):
        chosen = [choice.recipe for choice in gpu.prescriptions.values()]
        cells = [Text(" / ").join(_count(plan, n) for n in by_context.values()) for by_context in gpu.users.values()]
        table.add_row(
            gpu.gpus.name,
            f"{gpu.gpus.num_bytes / 1e9:.0f}",
            gigabytes(gpu.memory) if gpu.memory else NO_ROOM,
            *(cells if gpu.memory else [""] * len(cells)),
            " / ".join(chosen[:1] if len(set(chosen)) == 1 else chosen),
            end_section=index == len(plan.asked) - 1,
        )
    return table


def _count(plan: CapacityPlan, num_users: int | None) -> Text:
    if num_users is None:
        return Text("-")
    return Text(str(num_users), style="bold" if num_users >= plan.num_users else "")


def _prescriptions_table(plan: CapacityPlan) -> Table:
    table = _table("What --kv-format auto takes, and why", "GPU", "context", "format", "reason", left=4)
    for column in table.columns:
        column.vertical = "top"
    for gpu in plan.asked:
        for context, choice in gpu.prescriptions.items():
            table.add_row(
                gpu.gpus.name if context == plan.contexts[0] else "",
                tokens(context),
                choice.recipe,
                choice.reason,
                end_section=context == plan.contexts[-1],
            )
    return table
