"""Room on a cluster for the parts of a run: a placement group for each kind, and each part's place in it.

::

    RayArguments --plan_parts--> bundles --> reserve: placement groups, all of them or none
                                                | no room in time: ConfigError: what was asked, what there is
                                                v
                                             Room.options: what Ray's `actor.options` takes
"""

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

from forebay.cluster.arguments import RayArguments
from forebay.config import ConfigError

Bundle = dict[str, float]
STRATEGIES = {"trainer": "PACK", "engine": "SPREAD", "worker": "SPREAD"}
"""Ray's, by kind of part. Ranks are near each other, because they say much to each other; engines and workers
are apart, so that a lost machine takes few of them along."""


def reserve(ray: Any, plan: "Plan", *, timeout_s: float, may_grow: bool) -> dict[str, Any]:
    """A placement group for the bundles of each kind of part; `may_grow`: nodes may join while it waits.

    Raises:
        ConfigError: there is no room within `timeout_s`, or there never will be.
    """
    # A cluster that was started for the run stays as it is: what does not fit now never will.
    if may_grow or not (reason := _never_fits(ray, plan.every_bundle)):
        module = import_module("ray.util.placement_group")
        # All at once, so that a cluster that grows knows how much is missing.
        groups = {
            kind: module.placement_group(list(bundles), strategy=STRATEGIES[kind])
            for kind, bundles in plan.bundles.items()
        }
        deadline_s = time.monotonic() + timeout_s
        if all(group.wait(max(0.1, deadline_s - time.monotonic())) for group in groups.values()):
            return groups
        # Left alone, they would take the room as soon as there is some.
        for group in groups.values():
            module.remove_placement_group(group)
        reason = _never_fits(ray, plan.every_bundle) or "other programs hold what is missing"
        reason = f"no room within {timeout_s:g} s: {reason}"
    raise ConfigError(f"{reason}; {_what_there_is(ray, plan.every_bundle)}")


@dataclass(frozen=True)
class Room:
    """A part's place: a bundle, and what of it the part takes."""

    group: str
    """The name of the placement group: the kind of part, or, for a part that joined a run, the group's id."""
    bundle: int
    cpus: float
    gpus: float
    lender: tuple[int, int] | None = None
    """The engine, by its number, that has the GPU of this part by Ray's count; and which of its GPUs that is."""

    @property
    def device(self) -> str:
        """The device of a model in this room: ``cuda`` or ``cpu``."""
        return "cuda" if self.gpus else "cpu"

    def options(self, groups: Mapping[str, Any]) -> dict[str, Any]:
        """The place of an actor, as Ray's `options` take it; `groups` are all placement groups of the run."""
        strategy = import_module("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy
        place = strategy(groups[self.group], placement_group_bundle_index=self.bundle)
        return {"num_cpus": self.cpus, "num_gpus": 0 if self.lender else self.gpus, "scheduling_strategy": place}


@dataclass(frozen=True)
class Plan:
    """The bundles of a run, and each part's place in them.

    >>> plan_parts(RayArguments(num_workers=2), cpus=0.5).bundles
    {'trainer': [{'CPU': 0.5}], 'engine': [{'CPU': 0.5}], 'worker': [{'CPU': 0.5}, {'CPU': 0.5}]}
    """

    bundles: Mapping[str, Sequence[Bundle]] = field(default_factory=dict)
    """The bundles of each kind of part."""
    trainer: Room | None = None
    ranks: tuple[Room, ...] = ()
    """The rooms of the trainer's ranks, if it has several; then it has no GPU itself."""
    engines: tuple[Room, ...] = ()
    workers: tuple[Room, ...] = ()

    @property
    def every_bundle(self) -> list[Bundle]:
        """The bundles of all kinds."""
        return [bundle for of_kind in self.bundles.values() for bundle in of_kind]


def plan_parts(asked: RayArguments, *, cpus: float, num_ranks: int = 1, sharing: int = 0, least: int = 0) -> Plan:
    """A bundle for each part; the first engines, so many as are `sharing`, have one each with their ranks.

    A trainer on several ranks is in the bundle of the first one. A run that only generates has no rank and no
    trainer. There are at `least` so many engines, and workers.
    """
    bundles: defaultdict[str, list[Bundle]] = defaultdict(list)
    each = int(asked.gpus_per_engine)

    def room(kind: str, gpus: float, num_parts: int = 1) -> Room:
        bundles[kind].append({"CPU": num_parts * cpus, "GPU": gpus} if gpus else {"CPU": num_parts * cpus})
        return Room(kind, len(bundles[kind]) - 1, cpus, gpus)

    # Ray gives a part no shares of several GPUs. So the engine has them all, and tells the ranks which they are.
    engines = [room("trainer", each, 1 + each) for _ in range(sharing)]
    ranks = [
        replace(engine, gpus=1, lender=(number, gpu)) for number, engine in enumerate(engines) for gpu in range(each)
    ]
    ranks += [room("trainer", asked.gpus_per_trainer) for _ in range(num_ranks - len(ranks))]
    trainer = ranks[0] if ranks else None
    if num_ranks > 1:
        bundles["trainer"][0]["CPU"] += cpus
        trainer = replace(ranks[0], gpus=0, lender=None)
    engines += [room("engine", asked.gpus_per_engine) for _ in range(max(least, asked.num_engines) - sharing)]
    workers = [room("worker", 0) for _ in range(max(least, asked.num_workers))]
    return Plan(dict(bundles), trainer, tuple(ranks) if num_ranks > 1 else (), tuple(engines), tuple(workers))


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
