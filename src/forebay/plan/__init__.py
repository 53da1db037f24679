"""Plans: whether a run fits a device and how long its steps will take, before it is started."""

from forebay.plan.estimate import Plan, check_memory, make_plan, verdict, with_server_share
from forebay.plan.hardware import Device, parse_devices, this_machine

__all__ = [
    "Device",
    "Plan",
    "check_memory",
    "make_plan",
    "parse_devices",
    "this_machine",
    "verdict",
    "with_server_share",
]
