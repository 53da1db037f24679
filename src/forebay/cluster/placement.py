"""Room on a cluster for the parts of a run: one placement group, and each part's place in it.

::

    RayArguments --plan_parts--> bundles --> reserve: a placement group, whole or not at all
                                                | no room in time: ConfigError: what was asked, what there is
                                                v
                                             Room.options: what Ray's `actor.options` takes
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from forebay.cluster.arguments import RayArguments
from forebay.config import ConfigError

Bundle = dict[str, float]


def reserve(ray: Any, bundles: Sequence[Bundle], *, timeout_s: float, may_grow: bool) -> Any:
    """A placement group with all bundles, near each other; `may_grow`: nodes may join while it waits.

    Raises:
        ConfigError: there is no room within `timeout_s`, or there never will be.
    """
    # A cluster that was started for the run stays as it is: what does not fit now never will.
    if not may_grow and (reason := _never_fits(ray, bundles)):
        raise ConfigError(f"{reason}; {_what_there_is(ray, bundles)}")
    groups = import_module("ray.util.placement_group")
    group = groups.placement_group([dict(bundle) for bundle in bundles], strategy="PACK")
    if not group.wait(timeout_s):
        # Left alone, it would take the room as soon as there is some.
        groups.remove_placement_group(group)
        reason = _never_fits(ray, bundles) or "other programs hold what is missing"
        raise ConfigError(f"no room within {timeout_s:g} s: {reason}; {_what_there_is(ray, bundles)}")
    return group


@dataclass(frozen=True)
class Room:
    """A part's place: a bundle, and what of it the part takes."""

    bundle: int
    cpus: float
    gpus: float
    group: Any = None
    """The placement group, of a part that joined a run; None: that of the run's first parts."""

    @property
    def device(self) -> str:
        """The device of a model in this room: ``cuda`` or ``cpu``."""
        return "cuda" if self.gpus else "cpu"

    def options(self, group: Any) -> dict[str, Any]:
        """The place of an actor, as Ray's `options` take it; `group` is that of the run's first parts."""
        strategies = import_module("ray.util.scheduling_strategies")
        strategy = strategies.PlacementGroupSchedulingStrategy
        place = strategy(self.group or group, placement_group_bundle_index=self.bundle)
        return {"num_cpus": self.cpus, "num_gpus": self.gpus, "scheduling_strategy": place}


@dataclass(frozen=True)
class Plan:
    """The bundles of a run, and each part's place in them.

    >>> plan_parts(RayArguments(num_workers=2), cpus=0.5, shares_gpu=False).bundles
    ({'CPU': 0.5}, {'CPU': 0.5}, {'CPU': 0.5}, {'CPU': 0.5})
    """

    bundles: tuple[Bundle, ...] = ()
    trainer: Room | None = None
    ranks: tuple[Room, ...] = ()
    """The rooms of the trainer's ranks, if it has several; then it has no GPU itself."""
    engines: tuple[Room, ...] = ()
    workers: tuple[Room, ...] = ()

    @property
    def num_cpus(self) -> float:
        """Logical CPUs in all."""
        return sum(bundle["CPU"] for bundle in self.bundles)


def plan_parts(asked: RayArguments, *, cpus: float, shares_gpu: bool, num_ranks: int = 1) -> Plan:
    """A bundle for each part; with `shares_gpu` the first engine is in the trainer's, on its GPU.

    A trainer on several ranks has a bundle for each of them, with `gpus_per_trainer`, and one without. A run
    that only generates has no rank and no trainer; its first engine has as much of a GPU as it would have
    beside one.
    """
    bundles: list[Bundle] = []

    def room(gpus: float) -> Room:
        bundles.append({"CPU": cpus, "GPU": gpus} if gpus else {"CPU": cpus})
        return Room(len(bundles) - 1, cpus, gpus)

    trainer, ranks, engines = None, [], []
    if shares_gpu:
        # Half each: Ray counts shares of a device, and knows nothing of its memory.
        bundles.append({"CPU": 2 * cpus, "GPU": asked.gpus_per_trainer})
        trainer = Room(0, cpus, asked.gpus_per_trainer / 2)
        engines.append(trainer)
    elif num_ranks:
        trainer = room(asked.gpus_per_trainer if num_ranks == 1 else 0)
        ranks = [room(asked.gpus_per_trainer) for _ in range(num_ranks)] if num_ranks > 1 else []
    engines += [room(asked.gpus_per_engine) for _ in range(asked.num_engines - len(engines))]
    workers = [room(0) for _ in range(asked.num_workers)]
    return Plan(tuple(bundles), trainer, tuple(ranks), tuple(engines), tuple(workers))


def _never_fits(ray: Any, bundles: Sequence[Bundle]) -> str:
    """Why there will be no room however long one waits; empty if there may be."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for bundle in bundles:
        if not any(all(node.get(name, 0) >= amount for name, amount in bundle.items()) for node in nodes):
            return f"no machine of the cluster has {_words(bundle)}, which one part of the run asks for"
    total, have = _sum(bundles), ray.cluster_resources()
    short = [name for name, amount in total.items() if have.get(name, 0) < amount]
    return f"the cluster has too few {' and '.join(short)} in all" if short else ""


def _what_there_is(ray: Any, bundles: Sequence[Bundle]) -> str:
    asked, have, free = _sum(bundles), ray.cluster_resources(), ray.available_resources()
    return (
        f"asked for {_words(asked)} in {len(bundles)} parts, the cluster has {_words(have, asked)}, of which "
        f"{_words(free, asked)} are free: lower num_engines, num_workers, cpus or the gpus in "
        f"cluster.arguments, or join a larger cluster with address"
    )


def _sum(bundles: Sequence[Bundle]) -> Bundle:
    names = dict.fromkeys(name for bundle in bundles for name in bundle)
    return {name: sum(bundle.get(name, 0) for bundle in bundles) for name in names}


def _words(amounts: Mapping[str, float], names: Mapping[str, Any] | None = None) -> str:
    return " and ".join(f"{amounts.get(name, 0):g} {name}" for name in (names or amounts))
