"""The keys of ``cluster.arguments``: checked before anything is started; needs no Ray."""

from typing import Annotated

from pydantic import AfterValidator, Field

from forebay.config import ConfigError, StrictModel
from forebay.runs.config import RunConfig
from forebay.runs.placement import tries_beside


def _is_share(value: float) -> float:
    if value > 1 and value != int(value):
        raise ValueError("must be a share of a GPU or a whole number of GPUs")
    return value


Share = Annotated[float, Field(ge=0, allow_inf_nan=False), AfterValidator(_is_share)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class RayArguments(StrictModel, strict=True):
    """Arguments of the cluster ``ray``."""

    num_engines: int = Field(default=1, ge=1)
    """Processes with an engine each."""
    num_workers: int = Field(default=1, ge=1)
    """Processes with agent loops and judges."""
    cpus: Positive | None = None
    """Logical CPUs that each part asks for; None: a quarter on a cluster that is started here, else 1."""
    gpus_per_engine: Share = 0
    """GPUs, or a share of one, for each engine; in a colocated run where they are whole, and 1 for each rank, those
    of the ranks, as far as they go."""
    gpus_per_trainer: Share = 0
    """GPUs for the trainer; of a trainer on several ranks, for each rank."""
    address: str | None = None
    """Address of a running cluster ("auto": this machine's); None: ``RAY_ADDRESS``, else one is started."""
    placement_timeout_s: Positive = 60.0
    """Seconds to wait for room on the cluster."""
    max_restarts: int = Field(default=3, ge=0)
    """How often the run may go back to a checkpoint, because it lost its trainer or another part that only
    a checkpoint brings back, without a finished train step in between."""

    def check(self, config: RunConfig) -> None:
        """Check that the arguments go with the rest of the run.

        Raises:
            ConfigError: they do not.
        """
        if "urls" in config.engine.arguments and (self.num_engines > 1 or tries_beside(config)):
            # Several engines would each pause, load and count the same servers.
            raise ConfigError(
                f"cluster.arguments.num_engines = {self.num_engines}, but engine.arguments.urls names "
                f"servers that run already, of which one engine drives all: set num_engines to 1, and "
                f"evaluate.mode to 'pause'"
            )
        if config.train.ranks > 1 and 0 < self.gpus_per_trainer <= 0.5:
            # Each rank gets so much; NCCL would refuse only after every part has loaded its model.
            raise ConfigError(
                f"cluster.arguments.gpus_per_trainer = {self.gpus_per_trainer} may put several of "
                f"train.ranks = {config.train.ranks} on one GPU, which NCCL refuses: set it above 0.5"
            )
