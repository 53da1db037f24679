"""The traffic of a step between GPUs and machines: bytes by the table of docs/scale.md, and their seconds.

::

    --gpus 6x8xH100-80GB, [cluster] --find_places--> machines with ranks, machines with engines
                           step_traffic: a rank's weights and gradients, which computing hides; within layers
                           sync_cost: ranks --> the first one's machine --> each machine with engines
"""

from typing import Any, NamedTuple

from forebay.config import ConfigError
from forebay.plan.hardware import HOST_BYTES_PER_S, Device
from forebay.plan.memory import StepMemory
from forebay.plan.turns import engine_itemsize, heads, on_machine
from forebay.runs.config import RunConfig
from forebay.runs.placement import SERVERS, num_engines, num_sharing, shared_gpu, tries_beside
from forebay.train import TrainConfig

LINK_SHARE = 0.75
"""Of a link or a network, in collectives of large messages; an assumption that nothing has confirmed yet."""
RAY_BYTES_PER_S = 1e9
"""Of one machine that pulls an object from another; two simulated nodes on two busy cores made 0.4 to 0.7."""


class Places(NamedTuple):
    """On how many machines ranks are, near each other, and engines of production, apart; of these without the
    trainer's."""

    ranks: int
    ranks_each: int
    engines: int


def find_places(config: RunConfig, device: Device) -> Places:
    """Where parts find room, on Ray as `forebay.cluster.placement` asks for it.

    Raises:
        ConfigError: there are too few GPUs, or ranks that machines without a cluster do not share out evenly.
    """
    ranks, cluster = config.train.ranks, config.cluster
    each = device.count // device.machines if device.is_gpu else ranks
    one = {"gpus_per_trainer": 1, "gpus_per_engine": 1, "num_engines": 0}
    asked = one if cluster is None else dict.fromkeys(one, 0) | {"num_engines": 1} | cluster.arguments
    by_rank, by_engine, engines = (asked[name] for name in one)
    apart = cluster is not None and tries_beside(config)
    # The last of several is for evaluations, else one more.
    engines = max(engines, 2 * apart)
    is_known = cluster is None or (cluster.name == "ray" and device.is_gpu)
    if not (is_known and by_rank and by_engine):
        raise ConfigError(
            f"{device.machines} x {each} {device.name}: plans of a cluster are for GPUs that --gpus names, with "
            f"cluster=ray, gpus_per_trainer and gpus_per_engine"
        )
    # A share of a GPU counts as all of it. Ray fills one machine after the other, torchrun all alike.
    at_once = int(each // max(1, by_rank)) if cluster else min(each, ranks // device.machines)
    machines = -(-ranks // max(1, at_once))
    others = device.machines - machines
    left = machines * each - ranks * max(1, by_rank)
    room = others * (each // max(1, by_engine)) + left // max(1, by_engine)
    sharing = num_sharing(config)
    if at_once < 1 or others < 0 or room + sharing < engines:
        fix = "lower one of them, or name more with --gpus"
        if cluster is None and device.machines > 1:
            fix = f"torchrun and srun start as many on each machine, such as train.ranks={device.count}"
        raise ConfigError(
            f"train.ranks = {ranks} with {by_rank:g} GPUs each and {engines} engines with {by_engine:g} each "
            f"do not go on {device.machines} x {each} GPUs: {fix}"
        )
    # Those that share GPUs with ranks are where these are.
    far = max(0, -(-sharing * int(by_engine) // at_once) - 1)
    alone = min(engines - apart - sharing, others + (machines > 1 and left >= by_engine))
    return Places(machines, min(ranks, at_once), far + alone)


class Traffic(NamedTuple):
    """Bytes of weights and gradients that a rank sends in a train step, their seconds, and those of them that
    pass while it computes; and the same within layers, where it waits for them."""

    weights_bytes: float
    weights_s: float
    hidden_s: float
    layers_bytes: float
    layers_s: float


def step_traffic(
    config: RunConfig, device: Device, sizes: Any, step: StepMemory, longest: int, computing_s: float
) -> dict[int, Traffic]:
    """By `replicas`: as the run file says, and on several machines hybrid sharding beside full sharding.

    Passes compute for `computing_s` in all; `sizes` are transformers' of the language model.
    """
    train, parallel, places = config.train, config.train.parallel, find_places(config, device)
    if train.ranks == 1 or device.link_bytes_per_s is None:
        return {}
    tensor, context, itemsize = parallel.num_tensor, parallel.context, 2 if train.dtype == "bfloat16" else 4
    dealt = -(-config.batch_size * config.rollouts_per_prompt * parallel.same_sequences // train.ranks)
    at_once = max(1, train.token_budget // longest) * train.mini_batches
    backward, forward = -(-dealt // at_once) * train.optimizer_steps, num_forward(train)
    # Of a layer each of the `tensor` ranks has a part.
    outside = sizes.vocab_size * sizes.hidden_size * (1 if sizes.tie_word_embeddings else 2)
    own = (outside + (step.num_parameters - outside) / tensor) / step.num_parameters
    gathered = own * step.num_parameters * itemsize * backward * (2 + forward / train.epochs)
    summed = own * step.gradient_bytes * (train.optimizer_steps if train.lora_rank else backward)
    # Experts that are shared out stay where they are, and tokens travel to each that they are sent to, and back.
    staying = step.num_in_experts / step.num_parameters if parallel.tensor == "experts" else 0
    sent = 2 * sizes.hidden_size * sizes.num_experts_per_tok * step.num_expert_layers / context if staying else 0
    passes = train.epochs * (3 if train.gradient_checkpointing else 2) + forward
    one_number = passes * dealt * longest * itemsize
    within = one_number * sizes.num_hidden_layers * 2 * sum(heads(sizes)) * (context - 1) / context**2
    # Of a layer that is computed again only what its backward pass needs: not the last sum.
    again = step.num_reduces[0] - sizes.num_hidden_layers if train.gradient_checkpointing else 0
    reduces = forward * step.num_reduces[0] + train.epochs * (sum(step.num_reduces) + again)
    within += reduces * 2 * sizes.hidden_size * (tensor - 1) / tensor * dealt * longest * itemsize
    within_s = _seconds(device, within, -(-parallel.same_sequences // places.ranks_each), 1)
    found = {}
    for replicas in dict.fromkeys((parallel.replicas, places.ranks if parallel.replicas == 1 else 1)):
        if train.ranks % (replicas * parallel.same_sequences) == 0:
            group = train.ranks // replicas
            moved = (gathered + summed) * (1 - staying)
            weights_s = _seconds(device, moved, -(-group // places.ranks_each), tensor)
            # Of the slices of a machine each is summed up with its copies on others, which slice experts.
            copied = summed * (1 - staying) / (group / tensor) if replicas > 1 else 0
            sliced = (gathered + summed) * staying / group if replicas > 1 else 0
            weights_s += _seconds(device, 2 * copied + sliced, places.ranks, min(places.ranks_each, group))
            hidden_s = min(weights_s, computing_s)
            travel = one_number * sent * (1 - 1 / group)
            travel_s = _seconds(device, travel, -(-group // places.ranks_each), 1)
            found[replicas] = Traffic(
                moved + copied + sliced, weights_s, hidden_s, within + travel, within_s + travel_s
            )
    return found


def num_forward(train: TrainConfig) -> int:
    """Passes over all tokens without gradient: for old log probabilities, and those of a reference."""
    return (train.needs_old_logprobs and train.correction != "ratio") + train.uses_reference


def _seconds(device: Device, num_bytes: float, machines: int, streams: int) -> float:
    """For a rank's `num_bytes` in a ring over so many machines, `streams` of which enter a machine."""
    over_network = num_bytes * streams * (1 - 1 / machines) / device.network_bytes_per_s
    return max(num_bytes / (device.link_bytes_per_s or HOST_BYTES_PER_S), over_network) / LINK_SHARE


def sync_cost(config: RunConfig, device: Device, step: StepMemory) -> tuple[float, float]:
    """Bytes between machines, and seconds, of a hand-over to the engines of production: of all weights, or of
    adapters alone."""
    name, arguments, host = config.engine.name, config.engine.arguments, HOST_BYTES_PER_S
    is_server, is_beside = name in SERVERS, device.is_gpu and shared_gpu(*on_machine(config, device)) is not None
    # Servers are started for adapters where the run itself does it.
    takes = arguments.get("takes_adapters", "urls" not in arguments)
    alone, whole = config.train.lora_rank > 0 and takes, step.num_parameters * engine_itemsize(config)
    # Servers without buckets read a file, which is written first.
    by_file = is_server and (alone or (not is_beside and (name == "sglang" or "urls" in arguments)))
    num_bytes, places = step.gradient_bytes if alone else whole, find_places(config, device)
    # Ranks of several machines make each weight whole, on all that slice it; every rank has all adapters.
    machines = -(-config.train.ranks // config.train.parallel.replicas // places.ranks_each)
    there = 0 if alone else num_bytes * (machines - 1)
    there_s = _seconds(device, num_bytes, machines, 1) if there else 0
    if config.cluster is None:
        # Into the host's memory, and out of it into that of an engine in another process.
        through_host = by_file or config.train.ranks > 1 or name == "process" or (is_server and not is_beside)
        one_s = num_bytes * (4 if by_file else 2) / host if through_host else whole / (device.bytes_per_s or host)
        return there, there_s + one_s
    # From the first of these, all at once: to each server on another machine by a sender that reads the host's
    # memory, or once to each machine with engines.
    if is_server and not by_file:
        back = num_bytes * num_engines(config, of_production=True) * (places.engines > 0)
        back_s = back / min(host, device.network_bytes_per_s * LINK_SHARE)
    else:
        back = num_bytes * places.engines
        back_s = max(num_bytes * (back > 0) / RAY_BYTES_PER_S, back / device.network_bytes_per_s)
    return there + back, there_s + back_s + num_bytes * (4 if by_file else 2) / host
