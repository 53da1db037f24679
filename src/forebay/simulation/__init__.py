"""Simulation of runs: the real loops, on virtual time and on a cluster that is only described."""

from typing import TYPE_CHECKING, Any

from forebay.simulation.cluster import ClusterConfig, LengthConfig

if TYPE_CHECKING:
    from forebay.simulation.prediction import simulate
    from forebay.simulation.result import SimulationResult

__all__ = ["ClusterConfig", "LengthConfig", "SimulationResult", "simulate"]

_HOMES = {"SimulationResult": "result", "simulate": "prediction"}


def __getattr__(name: str) -> Any:
    # The loops of a run load torch.
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
