"""A plan as a person reads it: a table of memory, whether it fits, and the time of a step."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Column, Table

from forebay.plan.estimate import Plan, verdict
from forebay.plan.hardware import GIB, MIB


def show_plan(plan: Plan, console: Console) -> None:
    """Print the table and the sentences below it."""
    unit, size_of_unit = ("GiB", GIB) if plan.total >= GIB else ("MiB", MIB)
    columns = (Column(f"{turn}, {unit}", justify="right") for turn in plan.turns)
    where = plan.device.name if plan.device.count == 1 else f"one of {plan.device.count} {plan.device.name}"
    table = Table("part", *columns, title=f"Memory on {where}", title_justify="left")
    for name in dict.fromkeys(name for parts in plan.turns.values() for name in parts):
        cells = (parts.get(name) for parts in plan.turns.values())
        table.add_row(name, *("" if size is None else f"{size / size_of_unit:,.1f}" for size in cells))
    table.add_section()
    sums = (sum(parts.values()) for parts in plan.turns.values())
    table.add_row("all", *(f"{size / size_of_unit:,.1f}" for size in sums))
    table.add_row("the device has", f"{plan.device.memory_bytes / size_of_unit:,.0f}")
    console.print(table)
    for line in sentences(plan):
        console.print(line, highlight=False, markup=False)


def sentences(plan: Plan) -> Iterator[str]:
    """Whether it fits, what to change if not, and the times."""
    yield verdict(plan)
    if plan.host_bytes:
        yield f"Beside it, memory of the host: {plan.host_bytes / GIB:.3g} GiB."
    if (times := plan.times) is not None:
        yield (
            f"A step, if all responses are as long as they may be ({plan.longest} tokens with the prompt): "
            f"{times.step_s:.3g} s; generation alone {times.generation_s:.3g} s, training alone "
            f"{times.training_s:.3g} s, a sync {plan.sync_s:.3g} s, "
            f"{plan.tokens_per_step / times.step_s:,.0f} tokens/s"
        )
