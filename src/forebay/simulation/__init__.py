"""Simulation of runs: the real loops, on virtual time and on a cluster that is only described."""

from typing import TYPE_CHECKING

from forebay.lazy import lazy_names
from forebay.simulation.cluster import ClusterConfig, LengthConfig

if TYPE_CHECKING:
    from forebay.simulation.prediction import SimulationResult, simulate

__all__ = ["ClusterConfig", "LengthConfig", "SimulationResult", "simulate"]

# The loops of a run load torch.
__getattr__ = lazy_names(__name__, __file__)
