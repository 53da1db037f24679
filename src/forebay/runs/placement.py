"""The contract between a run and a cluster: the same parts, in other processes.

::

    run file [cluster] --make_cluster--> Cluster --open: room--> --start: processes-->
                                            | controller, agent_loop, trainer: the run's parts
    PartLost: a part ended that only a checkpoint brings back --> the run goes on from its last one

This row knows no cluster: `forebay.cluster` has the implementation, which a run file names.
"""

import contextlib
import math
import re
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from forebay.config import ConfigError, look_up
from forebay.engines.base import Seat
from forebay.engines.pool import EnginePool
from forebay.models import Precision, attention_choices, find_device, precision_on
from forebay.models.loading import model_config
from forebay.produce.strategies.context import GroupGenerator
from forebay.runs.config import CLUSTERS, RunConfig
from forebay.train.batch import Groups, TrainBatch
from forebay.train.parallel.place import find_place
from forebay.types import FloatArray
from forebay.watching.activity import Activities

RetryListener = Callable[[str | None, str | int | None, str], None]
"""Takes the task and the id of a group that is generated again, and why."""

Listener = Callable[[str, str], None]
"""Takes the name of a part, and why it was started again."""


class PartLost(RuntimeError):
    """The trainer, or another part whose state cannot be made anew, has ended; the message says why."""


class Cluster(Protocol):
    """Where the parts of a run are that are not in this process.

    A cluster outlives the run that uses it: after a `PartLost`, `open` and `start` make anew what has ended,
    and a run built on it again goes on from a checkpoint.
    """

    max_restarts: int
    """How often a run may go back to a checkpoint without finishing a train step in between."""

    def listen(self, on_retry: RetryListener | None = None, on_restart: Listener | None = None) -> None:
        """Tell these, and none of before, of what is made again; restarts are kept while none listens."""

    async def open(self, *, trains: bool = True) -> None:
        """Have room for every part; without `trains` there is no trainer.

        Raises:
            ConfigError: there is no cluster, or no room for the parts on it.
        """

    def start(self, model_folder: Path) -> None:
        """Have every other part running; blocks.

        Raises:
            ConfigError: a part cannot be built.
            PartLost: one that was built before cannot be built again.
        """

    def controller(self) -> EnginePool:
        """Pauses and continues the engines and gives them weights."""

    def eval_controller(self) -> EnginePool | None:
        """The same for evaluations beside production, with engines of their own; None: they pause it."""

    def agent_loop(self, task_name: str, *, held_out: bool, activities: Activities) -> GroupGenerator:
        """Generates and judges the groups of a task: for training, or `held_out` ones."""

    def trainer(self) -> "Trainer":
        """The trainer, as its constructor made it.

        After a loss it may be the one of before, for a run that has it `resume` from a checkpoint.
        """

    def counts(self) -> dict[str, float]:
        """Losses and restarts so far, for a run's metrics."""

    async def close(self) -> None:
        """End every part, and what else was started for them."""


class Trainer(Protocol):
    """The methods of a trainer that the verbs of a run call; `forebay.train.TrainController` has them.

    All but `sync_weights` block: they are called in the run's compute thread.
    """

    @property
    def model_step(self) -> int:
        """The step of the weights: completed train steps."""

    def fit(self, groups: Groups, *, stale_thresholds: int | Mapping[str, int] | None = None) -> TrainBatch:
        """Make one train step on `groups`, and return the batch that was trained."""

    async def sync_weights(self, rollout_controller: Any) -> int:
        """Give the current weights to what generates; the bytes that one engine was given."""

    def pack(self, groups: Groups) -> TrainBatch:
        """A batch as the trainer cuts it."""

    def compute_logprobs(self, batch: TrainBatch) -> FloatArray:
        """Log probabilities of a packed batch's response tokens by the current weights."""

    def begin_save(self, path: Path | str) -> None:
        """Copy what a checkpoint folder is made of; it is written beside later steps."""

    def finish_save(self) -> None:
        """Wait until the folder is there; in any thread."""

    def resume(self, path: Path | str) -> int:
        """Go on from such a folder."""

    def offload(self, *, weights: bool) -> None:
        """Move the moments, and on one rank the models if asked, to the host's memory."""

    def onload(self) -> None:
        """Move back what `offload` moved."""

    def close(self) -> None:
        """End what belongs to the trainer alone, its ranks for example."""


def make_cluster(config: RunConfig) -> Cluster | None:
    """The cluster that the run file asks for, nothing started yet; None: everything is in this process.

    Raises:
        ConfigError: it is unknown, a library is missing, or an argument does not fit.
    """
    if config.cluster is None:
        return None
    kind, arguments = config.cluster.name, config.cluster.arguments
    # By its import path: what belongs to a cluster is not imported before a run asks for one.
    factory = look_up("cluster", CLUSTERS.get(kind, kind), {})
    cluster: Cluster = factory(config, **arguments)
    return cluster


@contextlib.asynccontextmanager
async def opened_cluster(config: RunConfig) -> AsyncIterator[Cluster | None]:
    """`make_cluster`, closed at the end of the block."""
    cluster = make_cluster(config)
    try:
        yield cluster
    finally:
        if cluster is not None:
            await cluster.close()


SERVERS = ("vllm", "sglang")
"""Engines behind HTTP."""


def gpus_per_server(config: RunConfig) -> int:
    """GPUs over which each inference server splits its model: as many as it is given, or by its own option."""
    if given := config.engine.arguments.get("gpus"):
        return max(map(len, given))
    options = " ".join(config.engine.arguments.get("options", ()))
    return math.prod(map(int, re.findall(r"-(?:(?:tensor|pipeline)-parallel-size|[tp]p(?:-size)?)[ =](\d+)", options)))


def rank_gpus(config: RunConfig, num_gpus: int | None = None) -> list[int]:
    """The GPU of each rank on this machine, which has `num_gpus`; none where the run computes elsewhere.

    Left out, those count that torch sees. Ranks have them in turn, from the first on, whatever starts them.
    """
    if config.cluster is not None or not (_count(config) if num_gpus is None else num_gpus):
        return []
    if ":" in config.device:
        return [int(config.device.partition(":")[2])]
    place = find_place()
    return list(range(config.train.ranks if place is None else place.num_here))


def engine_seat(config: RunConfig, number: int, num_gpus: int | None = None) -> Seat:
    """The GPUs of the server, or engine process, with this number: as the run file says, else without a rank.

    More of them than GPUs share these, and those of the ranks; on a GPU that ``device`` names are all. On a
    cluster servers are counted over all engines, and GPUs by the numbers that they have where the engine is.

    Raises:
        ConfigError: the run file names none for this one, or one that is not there.
    """
    arguments, is_server = config.engine.arguments, config.engine.name in SERVERS
    if not (arguments.get("servers") if is_server else config.engine.name == "process"):
        return Seat()
    given = arguments.get("gpus")
    if config.cluster is not None:
        shares = number // engines_each(config) < num_sharing(config)
        return Seat(tuple(given[number % len(given)]) if given else (), shares)
    ranks, count = rank_gpus(config, num_gpus), _count(config) if num_gpus is None else num_gpus
    if given is not None:
        if number >= len(given):
            raise ConfigError(f"engine.arguments.gpus names GPUs for {len(given)} servers, and none for another")
        gpus = tuple(given[number])
        if count and max(gpus) >= count:
            raise ConfigError(f"engine.arguments.gpus names GPU {max(gpus)}, and there are {count}, from 0 on")
    else:
        each = gpus_per_server(config) if is_server else 1
        if count and each > count:
            raise ConfigError(f"engine.arguments.options give each server {each} GPUs, and there are {count}")
        first = ranks[0] if ":" in config.device and ranks else len(ranks) + number * each
        gpus = tuple((first + n) % count for n in range(each)) if count else ()
    return Seat(gpus, is_shared=not set(ranks).isdisjoint(gpus))


def engine_seats(config: RunConfig, num_gpus: int | None = None) -> list[Seat]:
    """Those of all engines that the run begins with, by their numbers."""
    return [engine_seat(config, number, num_gpus) for number in range(num_engines(config))]


def shared_gpu(config: RunConfig, num_gpus: int | None = None) -> int | None:
    """The trainer's one GPU, if it is the only one of every server, too: they read its weights there."""
    ranks = rank_gpus(config, num_gpus)
    alone = config.train.ranks == 1 and {seat.gpus for seat in engine_seats(config, num_gpus)} == {tuple(ranks)}
    return ranks[0] if alone and ranks else None


def takes_turns(config: RunConfig, num_gpus: int | None = None) -> bool:
    """Whether servers and ranks take turns on some GPU: see `forebay.runs.turns`.

    Raises:
        ConfigError: one that is for evaluations would have to sleep over them, or the trainer is to let go of
            weights that are on several ranks, or that it is to verify.
    """
    if config.engine.name not in SERVERS:
        return False
    shared = [seat.is_shared for seat in engine_seats(config, num_gpus)]
    if not any(shared):
        return False
    if tries_beside(config) and shared[-1]:
        raise ConfigError(
            "evaluate.mode = 'beside' is for a server that does not sleep, and the last one is on a GPU of the "
            "trainer: give it another (engine.arguments.gpus), or set evaluate.mode = 'pause'"
        )
    if config.engine.arguments.get("offload") == "all" and (config.train.ranks > 1 or config.verify_weights):
        raise ConfigError(
            "engine.arguments.offload = 'all' takes weights off the device, which is for one rank, and not for "
            "verify_weights, which reads them there: set it to 'moments'"
        )
    return True


def _count(config: RunConfig) -> int:
    return torch.cuda.device_count() if find_device(config.device).type == "cuda" else 0


def num_sharing(config: RunConfig) -> int:
    """How many engines, the first ones, are on GPUs of ranks on Ray: in a colocated run whose parts have whole GPUs.

    Each has those of as many ranks as it asks for. Where too few ranks are left it has GPUs of its own.
    """
    asked = config.cluster.arguments if config.cluster else {}
    each = asked.get("gpus_per_engine", 0)
    if config.produce.mode != "colocated" or asked.get("gpus_per_trainer") != 1 or "urls" in config.engine.arguments:
        return 0
    return min(int(asked.get("num_engines", 1)), int(config.train.ranks // each) if each >= 1 else 0)


def tries_beside(config: RunConfig) -> bool:
    """Whether a run that trains tries held-out prompts beside production."""
    return config.evaluate.mode == "beside" and any(task.eval_data is not None for task in config.tasks)


def is_apart(config: RunConfig) -> bool:
    """Whether the trainer is in processes of its own, whose loss a checkpoint brings back: on Ray, and as ranks.

    So is one rank on a CPU whose run generates meanwhile: in one interpreter each would wait for the other. On
    a GPU it stays in the run's process, where engines read its memory; so with a loss of a script or a notebook.
    """
    is_spread = config.cluster is not None or config.train.ranks > 1
    is_beside = config.produce.mode == "separate" and not config.train.loss.startswith("__main__:")
    return is_spread or (is_beside and find_device(config.device).type == "cpu")


def yields_memory(config: RunConfig) -> bool:
    """Whether another process may need the memory of the trainer's GPU when a train step has ended.

    An engine or a reward model there cannot use what torch keeps cached here; an engine in this process can.

    Raises:
        ConfigError: as for `takes_turns`, and torch does not see the device.
    """
    # However deep in a composed judge.
    is_judged = any("'reward_model'" in str(task.judge) for task in config.tasks)
    is_own = config.engine.name in ("transformers", "process", *SERVERS)
    if is_judged or config.cluster is not None or not is_own:
        return True
    return takes_turns(config) or any(seat.is_shared for seat in engine_seats(config))


def num_engines(config: RunConfig, *, of_production: bool = False) -> int:
    """Engines, or servers, that the run begins with; or those `of_production`, of which none is for evaluations."""
    elsewhere, named = config.cluster.arguments if config.cluster else {}, engines_each(config)
    apart, places = of_production and tries_beside(config), elsewhere.get("num_engines", 1)
    # The last of several, else one more; on Ray with all servers of its own.
    return int(named * max(1, places - apart) if config.cluster else max(1, named - apart))


def engines_each(config: RunConfig) -> int:
    """Engines, or servers, of this process; on a cluster of each process that has some."""
    own = config.engine.arguments
    return int(own.get("engines") or own.get("servers") or len(own.get("urls", ())) or 1)


def base_precision(config: RunConfig, engine_dtype: Precision) -> Precision | None:
    """In which the trainer holds its weights: float32; None: that of its passes, which its device decides.

    So are those below adapters where engines compute in bfloat16: they are cast anyway.
    """
    return None if config.train.lora_rank > 0 and engine_dtype == "bfloat16" else "float32"


def device_fact(config: RunConfig) -> str:
    """Where and how a run trains, as its header says it: ``cuda (NVIDIA L4), bfloat16, sdpa attention``.

    Raises:
        ConfigError: torch does not see the device, or the kernel of attention does not go with it.
    """
    if config.cluster is not None:
        return f"placed by {config.cluster.name}"
    device = find_device(config.device)
    name = f" ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else ""
    precision = precision_on(device, config.train.dtype)
    # Of its config, before weights are loaded.
    kernel, *_ = attention_choices(
        config.train.attention,
        model_config(config.model, seed=config.seed),
        device=device,
        precision=precision,
        packed=config.train.layout == "packed",
    )
    return f"{device}{name}, {precision}, {kernel} attention"


def layout(config: RunConfig, num_gpus: int | None = None) -> str | None:
    """The GPUs of ranks and engines in one sentence; None where the run does not give them out."""
    ranks, seats = rank_gpus(config, num_gpus), engine_seats(config, num_gpus)
    if not ranks or not any(seat.gpus for seat in seats):
        return None
    kind = "servers" if config.engine.name in SERVERS else "engines"
    each = ["+".join(map(str, seat.gpus)) for seat in seats]
    shared = [gpus for gpus, seat in zip(each, seats, strict=True) if seat.is_shared]
    which = "all of these" if len(shared) == len(each) else f"of these {', '.join(shared)}"
    rest = f"; {which} give memory back while ranks train" * bool(shared)
    return f"Ranks are on the GPUs {', '.join(map(str, ranks))}, {kind} on {', '.join(each)}{rest}."


def idle_gpus(config: RunConfig, num_gpus: int | None = None) -> str | None:
    """A warning that counts the GPUs which a run leaves idle, with the keys that use them; None without any.

    Servers of others may use any number of them, and Ray shares them out.
    """
    arguments = config.engine.arguments
    count = torch.cuda.device_count() if num_gpus is None else num_gpus
    if count == 0 or config.cluster is not None:
        return None
    on_gpu = num_gpus is not None or find_device(config.device).type == "cuda"
    # Servers beside a trainer on a CPU have any of them.
    if not (config.engine.name in ("transformers", "process") or (on_gpu and arguments.get("servers"))):
        return None
    if not on_gpu:
        return f"{count} GPUs are idle: device = {config.device!r}; leave it out to use one"
    ranks = rank_gpus(config, count)
    idle = count - len(set(ranks).union(*(seat.gpus for seat in engine_seats(config, count))))
    if idle <= 0:
        return None
    more = "engine.arguments.servers" if config.engine.name in SERVERS else "engine.arguments.engines of 'process'"
    return f"{idle} of {count} GPUs are idle: {more} = N generates on more, train.ranks = N trains on N"
