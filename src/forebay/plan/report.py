"""A plan as a person reads it: a table of memory, whether it fits, and the time of a step."""

from collections.abc import Iterator

from rich.console import Console
from rich.table import Column, Table

from forebay.plan.estimate import Plan, verdict
from forebay.plan.hardware import GIB, MIB


def show_plan(plan: Plan, console: Console) -> None:
    """Print the table and the sentences below it."""
    unit, size_of_unit = ("GiB", GIB) if plan.total >= GIB else ("MiB", MIB)
    columns = (Column(f"{turn}, {unit}", justify="right") for turn in plan.turns)
    device, machines = plan.device, f" on {plan.device.machines} machines" * (plan.device.machines > 1)
    where = device.name if device.count == 1 else f"one of {device.count} {device.name}{machines}"
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
    yield from plan.layout
    if plan.host_bytes:
        yield f"Beside it, memory of the host: {plan.host_bytes / GIB:.3g} GiB."
    own = next(iter(plan.traffic), 1)
    for replicas, found in plan.traffic.items():
        yield (
            f"{'A' if replicas == own else f'With train.parallel.replicas={replicas}, a'} rank's slices are "
            f"{plan.slices_bytes * replicas / own / GIB:.3g} GiB; in a step it gathers and sums up "
            f"{found.weights_bytes / 1e9:,.0f} GB in {found.weights_s:.3g} s, of which computing hides "
            f"{found.hidden_s:.3g} s, and {found.layers_bytes / 1e9:,.0f} GB within layers in "
            f"{found.layers_s:.3g} s."
        )
    if (times := plan.times) is not None:
        yield (
            f"A step, if all responses are as long as they may be ({plan.longest} tokens with the prompt): "
            f"{times.step_s:.3g} s; generation alone {times.generation_s:.3g} s, training alone "
            f"{times.training_s:.3g} s, a sync {plan.sync_s:.3g} s ({times.sync_share:.0%} of the time"
            f"{f'; {plan.sync_bytes / 1e9:,.0f} GB between machines' * (plan.sync_bytes > 0)}), "
            f"{plan.tokens_per_step / times.step_s:,.0f} tokens/s"
        )
        if plan.waits_for_launches:
            yield "Training waits for kernels launched one by one: larger micro-batches or compiled layers need fewer."
