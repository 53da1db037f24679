"""The place of this process among those that torchrun or SLURM's srun started side by side; needs no torch.

::

    environment --find_place--> Place | None: this process is alone, and starts its ranks itself
"""

import os
import re
from functools import cache
from typing import NamedTuple


class Place(NamedTuple):
    """One of `size` processes, which are numbered machine by machine."""

    rank: int
    size: int
    gpu: int
    """Its number on its machine."""
    num_here: int
    """Processes on its machine."""
    port: int
    host: str
    """With the port: the store in which processes find each other."""
    has_store: bool
    """Whether torchrun keeps it; else the first process does."""


@cache
def find_place() -> Place | None:
    """The place that the environment names.

    It is taken out of the environment: a server that the run starts would take itself for one of several, and
    torch would look for torchrun's store where ranks meet.
    """
    environ = os.environ
    if "LOCAL_RANK" not in environ and environ.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        environ |= _of_slurm()
    if environ.get("WORLD_SIZE", "1") == "1" or "LOCAL_RANK" not in environ:
        return None
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    rank, size, gpu, num_here, port = (int(environ.pop(name)) for name in names)
    has_store = environ.pop("TORCHELASTIC_USE_AGENT_STORE", "") == "True"
    return Place(rank, size, gpu, num_here, port, environ.pop("MASTER_ADDR"), has_store)


def _of_slurm() -> dict[str, str]:
    """The variables that torchrun would give a task of srun; a batch script has none of a step."""
    environ = os.environ
    tasks, here = environ["SLURM_STEP_NUM_TASKS"], environ["SLURM_STEP_TASKS_PER_NODE"]
    num_here = re.split("[(,]", here)[0]
    # The first machine of gpu[03-05,9],cpu1.
    host = re.sub(r"\[(\w+)[^]]*\]|,.*", r"\1", environ["SLURM_STEP_NODELIST"])
    return {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": environ["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": num_here,
        "MASTER_ADDR": environ.get("MASTER_ADDR", "127.0.0.1" if num_here == tasks else host),
        # One for each job, below the ports that systems give away themselves.
        "MASTER_PORT": environ.get("MASTER_PORT", str(15_000 + int(environ["SLURM_JOB_ID"]) % 15_000)),
    }
