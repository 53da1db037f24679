"""A run's ranks load their libraries beside the run's own process, which takes as long to load its own."""

import os

from forebay.io.forked import start_loading
from forebay.runs.config import RunConfig

_GPUS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""Files of the drivers: torch, which knows better, is not loaded yet. A wrong guess costs time alone."""


def load_ranks(config: RunConfig) -> None:
    """Begin to load what is shared by the ranks of a run that has any outside of its process."""
    is_beside = config.produce.mode == "separate" and (config.device == "cpu" or not any(map(os.path.exists, _GPUS)))
    if config.cluster is None and (config.train.ranks > 1 or is_beside):
        start_loading()
