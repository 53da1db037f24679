"""Ray: the plain classes as actors, placed on a cluster and kept going."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forebay.cluster.ray_cluster import RayCluster

__all__ = ["RayCluster"]


def __getattr__(name: str) -> Any:
    if name == "RayCluster":
        from forebay.cluster.ray_cluster import RayCluster

        return RayCluster
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
