"""Plans: whether a run fits a device and how long its steps will take, before it is started."""

from forebay.plan.estimate import fit_memory, make_plan, verdict
from forebay.plan.hardware import parse_devices, this_machine

__all__ = [
    "fit_memory",
    "make_plan",
    "parse_devices",
    "this_machine",
    "verdict",
]
