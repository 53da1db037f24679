"""Plans: whether a run fits a device and how long its steps will take, before it is started."""

from forebay.plan.estimate import make_plan as make_plan
from forebay.plan.hardware import parse_devices as parse_devices
from forebay.plan.hardware import this_machine as this_machine
