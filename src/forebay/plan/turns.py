"""The parts of a run that a device holds in each turn.

::

                 trainer                                          engine here          servers on its GPU
    training     all of a step                                    weights              its context
    syncing      weights, moments, reference (not those that      -                    weights, a bucket
    generating   `offload` names, beside a server)                weights, cache       weights, cache
    warm-up      all weights, their gradients and moments         -                    -

In separate mode all work at once, but for such servers, and without any there is one turn.
"""

from collections.abc import Mapping
from typing import Any

from forebay.engines.base import DEFAULT_MAX_BATCH
from forebay.engines.weights.buckets import BUCKET_BYTES
from forebay.plan.hardware import HOST_BYTES_PER_S, MIB, Device
from forebay.plan.memory import StepMemory, step_memory
from forebay.runs import placement
from forebay.runs.config import RunConfig
from forebay.train.batch import TrainBatch

CONTEXT_BYTES = 600 * MIB
"""CUDA's context, the libraries' kernels and their work spaces, which every process on a GPU holds."""


def memory_by_turn(
    config: RunConfig, device: Device, hugging_face: Any, step: StepMemory, longest: int
) -> dict[str, dict[str, int]]:
    """Bytes by part on the trainer's device in each turn of a run; one turn if all work at once.

    Engines with devices of their own have a turn, too, for the fullest of these.
    """
    # Ranks on a CPU share its memory.
    copies = 1 if device.is_gpu else config.train.ranks
    trainer = {f"trainer: {name}": size * copies for name, size in step.parts.items()}
    here, elsewhere = engines_by_place(config, device)
    beside = is_server_beside(config, device)
    # An engine that takes adapters keeps the starting weights beside those that it merges them into.
    doubled = config.train.lora_rank and config.engine.arguments.get("takes_adapters", True) and not beside
    gpus = placement.gpus_per_server(config)
    weights = step.num_parameters * engine_itemsize(config) * (2 if doubled else 1) // gpus
    cache = num_running(config) * longest * cache_bytes_per_token(config, hugging_face) // gpus
    is_server = config.engine.name in placement.SERVERS
    name = "server" if is_server else "engine"
    given = config.engine.arguments.get("cache_tokens", "auto")
    if isinstance(given, int):
        cache = min(cache, given * cache_bytes_per_token(config, hugging_face))
    elif is_server:
        share = server_share(config, device, trainer if beside else {})
        room = int(share * device.memory_bytes) - weights - CONTEXT_BYTES
        # A server takes all of a share that the run file gives.
        has_share = "memory_share" in config.engine.arguments
        cache = max(room if has_share else min(cache, room), cache // num_running(config))

    def engines(count: int, *, with_cache: bool) -> dict[str, int]:
        parts = {f"{name}: weights": weights * count, f"{name}: key/value cache": cache * count * with_cache}
        return {part: size for part, size in parts.items() if size}

    if not here or (config.produce.mode == "separate" and not beside):
        turns = {"training": trainer | engines(here, with_cache=True)}
    else:
        waiting = _left(config, trainer, beside=beside)
        bucket = {"hand-over: a bucket": BUCKET_BYTES}
        turns = {"training": trainer | engines(0 if beside else here, with_cache=False)}
        if beside:
            turns["syncing"] = waiting | engines(here, with_cache=False) | bucket
        turns["generating"] = waiting | engines(here, with_cache=True)
    contexts = 1 + (here if config.engine.name != "transformers" else config.train.ranks > 1)
    if config.warmup is not None:
        turns["warm-up"] = {f"trainer: {name}": size for name, size in _warmup(config, hugging_face).items()}
    if device.is_gpu:
        for parts in turns.values():
            # A server that sleeps keeps its context, too.
            parts["CUDA context and libraries"] = CONTEXT_BYTES * contexts
    if elsewhere:
        turns["an engine's GPU"] = engines(elsewhere, with_cache=True) | {
            "CUDA context and libraries": CONTEXT_BYTES * elsewhere
        }
    return turns


def _left(config: RunConfig, trainer: Mapping[str, int], *, beside: bool) -> dict[str, int]:
    """The parts of the `trainer` on its device between two train steps: beside a server those that stay there."""
    offload = config.engine.arguments.get("offload", "moments") if beside else "none"
    stay = {"none": ("weights", "reference", "moments"), "moments": ("weights", "reference"), "all": ()}[offload]
    return {name: size for name, size in trainer.items() if name.removeprefix("trainer: ") in stay}


def turn_cost(config: RunConfig, device: Device, step: StepMemory) -> dict[str, Any]:
    """A simulation's ``sleeping`` servers, and ``turn_s``, in which the memory of a GPU changes hands."""
    if not is_server_beside(config, device):
        return {}
    # Weights of a server that new ones replace are not kept, but for adapters' base and by SGLang.
    has_base = config.train.lora_rank and config.engine.arguments.get("takes_adapters", True)
    replaced = 0 if has_base or config.engine.name == "sglang" else 1 / config.produce.sync_weights_interval
    num_here = engines_by_place(config, device)[0] / placement.gpus_per_server(config)
    kept = (1 - replaced) * num_here * step.num_parameters * engine_itemsize(config)
    stay, stay_beside = (sum(_left(config, step.parts, beside=beside).values()) for beside in (False, True))
    sleeping = sum(seat.is_shared for seat in placement.engine_seats(*on_machine(config, device)))
    return {"sleeping": sleeping, "turn_s": (stay - stay_beside + kept) / HOST_BYTES_PER_S}


def engines_by_place(config: RunConfig, device: Device) -> tuple[int, int]:
    """How many engines lie in the trainer's memory, and how many on the fullest GPU without a trainer."""
    if config.cluster is not None:
        sharing = placement.num_sharing(config) * placement.engines_each(config)
        return int(sharing > 0), int(placement.num_engines(config) > sharing)
    if config.engine.name == "transformers":
        return 1 + placement.tries_beside(config), 0
    # One more process, for evaluations beside one that produces, is where that is.
    count, is_process = placement.num_engines(config), config.engine.name == "process"
    numbers = [*range(count), *[0] * (is_process and count == 1 and placement.tries_beside(config))]
    if not device.is_gpu:
        return len(numbers) * is_process, 0
    here, num_gpus = on_machine(config, device)
    used = [gpu for number in numbers for gpu in placement.engine_seat(here, number, num_gpus).gpus]
    ranks = placement.rank_gpus(here, num_gpus)
    return max(map(used.count, ranks)), max(map(used.count, {*used}.difference(ranks)), default=0)


def _warmup(config: RunConfig, hugging_face: Any) -> Mapping[str, int]:
    """Memory by part of a supervised step of all weights, on examples as long as a micro-batch allows."""
    assert config.warmup is not None
    train = config.warmup.trained_as(config.train)
    examples = config.warmup.batch_size
    length = max(2, config.train.token_budget // examples)
    batch = TrainBatch.from_examples(([0], [0] * (length - 1)) for _ in range(examples))
    return step_memory(hugging_face, train, batch).parts


def is_server_beside(config: RunConfig, device: Device) -> bool:
    """Whether the run starts a server on a GPU of the trainer, with which it takes turns."""
    return device.is_gpu and placement.takes_turns(*on_machine(config, device))


def on_machine(config: RunConfig, device: Device) -> tuple[RunConfig, int]:
    """`config` with the ranks that torchrun starts on the run's own machine, and the GPUs there; a cluster's are
    not told apart."""
    if config.cluster is not None:
        return config, device.count
    train = config.train.model_copy(update={"ranks": config.train.ranks // device.machines})
    return config.model_copy(update={"train": train}), device.count // device.machines


def gpus_per_engine(config: RunConfig, device: Device) -> float:
    """The GPUs whose rate an engine of production has: on average, where several share some."""
    seats = placement.engine_seats(*on_machine(config, device))[: placement.num_engines(config, of_production=True)]
    used = [gpu for seat in seats for gpu in seat.gpus]
    shared = 1.0 if config.cluster or not used else len({*used}) / len(used)
    return placement.gpus_per_server(config) * shared


def server_share(config: RunConfig, device: Device, trainer: Mapping[str, int]) -> float:
    """The server's share of the device's memory: that of the run file, or what the `trainer` leaves."""
    if (given := config.engine.arguments.get("memory_share")) is not None:
        return float(given)
    stay = sum(_left(config, trainer, beside=True).values())
    num_here = max(1, engines_by_place(config, device)[0])
    left = device.memory_bytes - stay - CONTEXT_BYTES * num_here - BUCKET_BYTES
    return max(0.0, SERVER_SHARE * left / device.memory_bytes / num_here)


SERVER_SHARE = 0.95
"""The share of the memory that a trainer leaves free: plans are good to a tenth of the trainer's part."""


def num_running(config: RunConfig) -> int:
    """Requests that decode together in one engine."""
    under_way = config.batch_size * config.rollouts_per_prompt * (1 + config.produce.over_sample_threshold)
    most = config.engine.arguments.get("max_batch", DEFAULT_MAX_BATCH)
    return int(min(-(-under_way // placement.num_engines(config, of_production=True)), most))


def decode_bytes(config: RunConfig, hugging_face: Any, num_parameters: int, longest: int) -> int:
    """Bytes that an engine reads to make a token of each of its requests, which on average are half done."""
    cached = num_running(config) * longest // 2 * cache_bytes_per_token(config, hugging_face)
    return num_parameters * engine_itemsize(config) + cached


def engine_itemsize(config: RunConfig) -> int:
    """Bytes of a number in an engine."""
    return 2 if config.engine.dtype == "bfloat16" else 4


def cache_bytes_per_token(config: RunConfig, hugging_face: Any) -> int:
    """Bytes of an engine's keys and values for one token, over all layers."""
    sizes = hugging_face.get_text_config()
    return int(2 * sizes.num_hidden_layers * heads(sizes)[1] * engine_itemsize(config))


def heads(sizes: Any) -> tuple[int, int]:
    """The numbers of a token's queries, and of its keys, in one layer."""
    keys = getattr(sizes, "num_key_value_heads", None) or sizes.num_attention_heads
    head_dim = getattr(sizes, "head_dim", None) or sizes.hidden_size // sizes.num_attention_heads
    return sizes.num_attention_heads * head_dim, keys * head_dim
