"""Ray: the plain classes as actors, placed on a cluster and kept going."""

from typing import TYPE_CHECKING

from forebay.lazy import lazy_names

if TYPE_CHECKING:
    from forebay.cluster.ray_cluster import RayCluster

__all__ = ["RayCluster"]


__getattr__ = lazy_names(
    __name__,
    {"ray_cluster": ["RayCluster"]},
)
