"""Whether a run fits a device, what takes the memory, and how long a step will take: before a GPU is rented.

::

    RunConfig --> model's config (no weights), longest prompt and response
                    |--> trainer: `step_memory` -----------------+
                    |--> engine or server: weights, cache        +--> Plan: turns, total, what to change
                    '--> rates by the roofline --> ClusterConfig --> `forebay.simulation` --> step time
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from pydantic import ValidationError

from forebay.agents.build import prompt_tools
from forebay.config import ConfigError, errors_about
from forebay.models import Precision, attention, load_tokenizer, resolve_model
from forebay.models.config import TINY, ModelConfig
from forebay.models.loading import model_config
from forebay.plan import turns as device_turns
from forebay.plan.hardware import GIB, HOST_BYTES_PER_S, Device, this_machine
from forebay.plan.memory import SLICED, StepMemory, step_memory
from forebay.plan.traffic import Traffic, find_places, num_forward, step_traffic, sync_cost
from forebay.produce.prompts.dataset import num_prompt_tokens
from forebay.runs.config import RunConfig
from forebay.runs.placement import base_precision, idle_gpus, layout, num_engines
from forebay.runs.rollouts import engine_precision, load_data, task_agent, with_alphabet, with_precisions
from forebay.simulation.cluster import ClusterConfig, LengthConfig
from forebay.simulation.prediction import SimulationResult, simulate
from forebay.train import TrainConfig
from forebay.train.batch import TrainBatch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Memory on the fullest device by part, and times; see `make_plan`."""

    device: Device
    turns: Mapping[str, Mapping[str, int]]
    """Bytes by part, in each turn of the run: ``training``, ``generating``, and so on."""
    num_parameters: int
    longest: int
    """Tokens of the longest prompt and response."""
    host_bytes: int = 0
    """Memory of the GPU machine itself that all ranks of the trainer keep something in."""
    advice: Sequence[str] = ()
    """Overrides, each added to those before, until the run fits; empty if it does."""
    advised_bytes: int | None = None
    """Memory with them; None: none of them is enough, or it fits."""
    times: SimulationResult | None = None
    """Of a step, if every response were as long as it may be; None: for an unknown device."""
    traffic: Mapping[int, Traffic] = field(default_factory=dict)
    """Of a rank in that step, by `replicas`: as in the run file, and beside it hybrid or full sharding."""
    slices_bytes: int = 0
    """Of a rank's weights, gradients, moments and reference."""
    sync_bytes: float = 0.0
    """Between machines, to hand the weights to the engines."""
    sync_s: float = 0.0
    """Seconds for that, as in `times`."""
    waits_for_launches: bool = False
    """Whether the launching of kernels bounds training, and not the GPU."""
    tokens_per_step: int = 0
    layout: Sequence[str] = ()
    """Sentences: the GPUs of ranks and engines, and those that are left idle."""

    @property
    def parts(self) -> Mapping[str, int]:
        """Bytes in the largest turn."""
        return max(self.turns.values(), key=lambda parts: sum(parts.values()))

    @property
    def total(self) -> int:
        """Bytes in the largest turn, all parts together."""
        return sum(self.parts.values())

    @property
    def share(self) -> float:
        """The part of the device's memory that the largest turn takes."""
        return self.total / self.device.memory_bytes

    @property
    def fits(self) -> bool:
        """Whether a run is started: plans are good to a tenth."""
        return self.share <= REFUSE_SHARE


ARITHMETIC_SHARE, COPY_SHARE, DECODE_SHARE = 0.7, 0.88, 0.5
"""Attainable shares of the data sheet's: arithmetic of large products; bandwidth in a train step, and in decoding.
These and the times below are from an H200 (benchmarks/results/gpu.md)."""
PASS_LAUNCH_S, COMPILED_SHARE = 28e-6, 1 / 3
"""A process gives the GPU an operation of a train step in this time; and what compiling leaves of these times and
of the bytes that operations move."""
LAUNCH_S, GRAPH_LAUNCH_S = 0.7e-3, 0.18e-3
"""A layer of the in-process engine takes so long to decode a token beside its reading of weights: PyTorch launches
its kernels one by one, or a CUDA graph all of them. The first is an assumption."""
SIMULATED_STEPS = 6
"""All responses have one length, so a step is as the one before; twice as many where some steps have no sync, or
no generation, because servers slept over enough for two."""
WARN_SHARE, REFUSE_SHARE = 0.9, 1.1
"""Shares of the memory: above the first a plan warns, above the second a run is not started."""
_SAMPLED_PROMPTS = 200


def make_plan(config: RunConfig, device: Device, *, prompt_tokens: int | None = None) -> Plan:
    """Memory and times of `config` on `device`; `prompt_tokens` left out is the longest of the data's.

    Raises:
        ConfigError: the model or the data does not fit, or the model cannot be planned.
    """
    find_places(config, device)
    # Its prompts are long or short, and a tiny model knows their characters.
    data = load_data(config) if prompt_tokens is None or config.model.source == TINY else []
    config = _settled(with_alphabet(config, data), device)
    hugging_face = model_config(config.model, seed=config.seed)
    if prompt_tokens is None:
        prompt_tokens = _longest_prompt(config, data)
    response = max(_longest_response(config, task, hugging_face, prompt_tokens) for task in config.tasks)
    return _plan(config, device, hugging_face, prompt_tokens, prompt_tokens + response)


def fit_memory(config: RunConfig, device: Device | None = None) -> tuple[RunConfig, str | None]:
    """`config` as it can be started on `device`, and a warning if it may not fit; both from one plan.

    Servers on the trainer's GPUs get the share of their memory that they may take, if they have none: what the
    trainer leaves free while they generate.

    Without a `device` it is the run's own, on this machine. A plan takes seconds, so none is made for tiny
    models made here. Parts of a run on a cluster lie elsewhere. Where no plan can be made
    there is no warning, and the server takes its own default.

    Raises:
        ConfigError: it does not fit.
    """
    if config.cluster is not None:
        return config, None
    device = device or this_machine(config.device)
    lacks_share = device_turns.is_server_beside(config, device) and config.engine.arguments.get("memory_share") is None
    try:
        if not lacks_share and (not config.check_memory or config.model.source == TINY):
            return config, None
        plan = make_plan(config, device)
    except NO_PLAN as error:
        # The run says what is wrong with its model or data, if anything is.
        logger.log(logging.WARNING if lacks_share else logging.INFO, "no memory plan: %s", error)
        return config, None
    if config.check_memory and not plan.fits:
        raise ConfigError(f"{verdict(plan)} check_memory = false starts the run anyway.")
    warning = verdict(plan) if config.check_memory and plan.share > WARN_SHARE else None
    return _with_server_share(config, plan) if lacks_share else config, warning


NO_PLAN = (ConfigError, RuntimeError, ValueError, AttributeError, TypeError, KeyError)
"""Raised where a model's config or code is of a kind that a plan does not know; the run may go well."""


def verdict(plan: Plan) -> str:
    """One sentence: it fits, hardly, or not, and what to change."""
    sizes = f"{plan.total / GIB:.3g} of {plan.device.memory_bytes / GIB:.3g} GiB"
    if plan.share <= WARN_SHARE:
        return f"It fits: {sizes}."
    says = "It may not fit" if plan.fits else "It does not fit"
    changes = " ".join(plan.advice)
    if not changes:
        return f"{says}: {sizes}."
    if plan.advised_bytes is None:
        return f"{says}: {sizes}; nor with {changes}. Take a smaller model or a larger device."
    return f"{says}: {sizes}. With {changes}: {plan.advised_bytes / GIB:.3g} GiB, which fits."


def _settled(config: RunConfig, device: Device) -> RunConfig:
    """`config` with the precision that ``auto`` stands for on `device`, whose memory may be the host's."""
    config = with_precisions(config, auto=device.precision if device.is_gpu else "float32")
    if device.is_gpu:
        return config
    # The host's memory is the one that is planned.
    parallel = config.train.parallel.model_copy(update={"offload": False})
    here: dict[str, Any] = {"offload_activations": False, "parallel": parallel}
    if config.train.moments == "cpu":
        here["moments"] = "float32"
    return config.model_copy(update={"train": config.train.model_copy(update=here)})


def _longest_prompt(config: RunConfig, data: Sequence[Any]) -> int:
    """Tokens, over some hundred prompts of each task, spread over its data."""
    try:
        tokenizer = load_tokenizer(resolve_model(config.model, seed=config.seed, weights=False))
    except ConfigError as error:
        raise ConfigError(f"{error}; without one, give --prompt-tokens") from None
    longest = 1
    for task, part in zip(config.tasks, data, strict=True):
        tools = prompt_tools(task_agent(config, task))
        for index in np.unique(np.linspace(0, len(part.training) - 1, _SAMPLED_PROMPTS).astype(int)):
            longest = max(longest, num_prompt_tokens(part.training[int(index)], tokenizer, tools=tools))
    return longest


def _longest_response(config: RunConfig, task: Any, hugging_face: Any, prompt_tokens: int) -> int:
    """Tokens; episodes of several turns may fill the context."""
    if task.agent.name == "single_turn":
        return int(task.sample.max_tokens)
    context = task.agent.arguments.get("max_context") or config.model.max_context
    context = context or hugging_face.get_text_config().max_position_embeddings
    return max(int(task.sample.max_tokens), int(context) - prompt_tokens)


def _plan(config: RunConfig, device: Device, hugging_face: Any, prompt_tokens: int, longest: int) -> Plan:
    step, turns = _memory(config, device, hugging_face, prompt_tokens, longest)
    here, count = device_turns.on_machine(config, device)
    said = [*filter(None, (about(here, count) for about in (layout, idle_gpus) if device.is_gpu))]
    if device_turns.is_server_beside(config, device):
        share = _server_share(config, device, turns)
        said.append(f"Servers on GPUs of ranks have engine.arguments.memory_share = {share} when awake.")
    plan = Plan(
        device=device,
        turns=turns,
        num_parameters=step.num_parameters,
        longest=longest,
        host_bytes=step.host_bytes * here.train.ranks if device.is_gpu else 0,
        slices_bytes=sum(step.parts.get(kind, 0) for kind in SLICED),
        tokens_per_step=config.batch_size * config.rollouts_per_prompt * longest,
        layout=said,
        **_times(config, device, hugging_face, step, longest, prompt_tokens),
    )
    if plan.share <= WARN_SHARE:
        return plan
    changes: dict[str, Any] = {}
    advised, total = config, plan.total
    for key, value in _remedies(config, plan):
        table, _, name = key.rpartition(".")
        try:
            if table.startswith("train"):
                given = {**advised.train.model_dump(exclude_unset=True), "dtype": advised.train.dtype}
                (given if table == "train" else given.setdefault("parallel", {}))[name] = value
                part: dict[str, Any] = {"train": TrainConfig.model_validate(given)}
            else:
                arguments = {**advised.engine.arguments, name: value}
                part = {"engine": advised.engine.model_copy(update={"arguments": arguments})}
        except (ConfigError, ValidationError):
            # It does not go with the other settings.
            continue
        # A smaller budget takes the place of the one before.
        changes[key], advised = value, advised.model_copy(update=part)
        _, turns = _memory(advised, device, hugging_face, prompt_tokens, longest)
        total = max(sum(parts.values()) for parts in turns.values())
        if total <= WARN_SHARE * device.memory_bytes:
            break
    advice = [f"{key}={str(value).lower()}" for key, value in changes.items()]
    return replace(plan, advice=advice, advised_bytes=total if total <= WARN_SHARE * device.memory_bytes else None)


def _remedies(config: RunConfig, plan: Plan) -> list[tuple[str, Any]]:
    """Settings that need less memory, the cheapest first."""
    found: list[tuple[str, Any]] = []
    train, running = config.train, device_turns.num_running(config)
    if train.dtype == "float32":
        found.append(("train.dtype", "bfloat16"))
    if train.gradient_checkpointing not in (True, 1):
        found.append(("train.gradient_checkpointing", True))
    budget = train.token_budget
    while (budget := budget // 2) >= plan.longest:
        found.append(("train.token_budget", budget))
    if train.moments == "float32" and plan.device.is_gpu:
        found.append(("train.moments", "cpu"))
    if train.ranks > 1 and plan.device.is_gpu and not train.parallel.offload:
        found.append(("train.parallel.offload", True))
    if train.lora_rank == 0:
        found.append(("train.lora_rank", 32))
    if device_turns.is_server_beside(config, plan.device) and config.train.ranks == 1:
        found.insert(0, ("engine.arguments.offload", "all"))
    # Fewer requests at once, so that the fullest turn with a cache fits: first, if no train step is in it.
    cached = [parts for parts in plan.turns.values() if "engine: key/value cache" in parts]
    fullest = max(cached, key=lambda parts: sum(parts.values()), default={})
    over = sum(fullest.values()) - WARN_SHARE * plan.device.memory_bytes
    if over > 0 and (fewer := int(running * (1 - over / fullest["engine: key/value cache"]))) > 0:
        place = len(found) if "trainer: gradients" in fullest else 0
        found.insert(place, ("engine.arguments.max_batch", fewer))
    return found


def _memory(
    config: RunConfig, device: Device, hugging_face: Any, prompt_tokens: int, longest: int
) -> tuple[StepMemory, dict[str, dict[str, int]]]:
    """The memory of a train step alone, and all turns on `device`.

    Raises:
        ConfigError: a train step of such a model cannot be planned.
    """
    batch = _largest_batch(config, prompt_tokens, longest)
    train = config.train
    passes: Precision = "bfloat16" if train.dtype == "bfloat16" else "float32"
    kernel = attention.planned_attention(
        train.attention, hugging_face, is_gpu=device.is_gpu, precision=passes, packed=train.layout == "packed"
    )
    what = f"a train step of a model of type {hugging_face.model_type!r} cannot be planned"
    with errors_about(what, ConfigError, RuntimeError, ValueError):
        held = base_precision(config, engine_precision(config)) or passes
        source = train.teacher
        teacher = None if source is None else model_config(ModelConfig(source=source), seed=config.seed)
        step = step_memory(hugging_face, train, batch, attention=kernel, held=held, teacher=teacher)
    return step, device_turns.memory_by_turn(config, device, hugging_face, step, longest)


def _largest_batch(config: RunConfig, prompt_tokens: int, longest: int) -> TrainBatch:
    """The longest sequences, group by group, as many as fill two micro-batches at most."""
    group_size = config.rollouts_per_prompt
    # Of one mini-batch and rank: the others come after it, or have memory of their own.
    ranks = config.train.ranks // config.train.parallel.same_sequences
    num_groups = -(-config.batch_size // (config.train.mini_batches * ranks))
    # Whole groups would be packed into smaller micro-batches of equal size.
    enough = min(num_groups * group_size, 2 * max(1, config.train.token_budget // longest))
    response = [0] * (longest - prompt_tokens)
    return TrainBatch.from_examples(([number // group_size % 2] * prompt_tokens, response) for number in range(enough))


def _server_share(config: RunConfig, device: Device, turns: Mapping[str, Mapping[str, int]]) -> float:
    trainer = {name: size for name, size in turns["training"].items() if name.startswith("trainer: ")}
    return round(device_turns.server_share(config, device, trainer), 3)


def _with_server_share(config: RunConfig, plan: Plan) -> RunConfig:
    arguments = {**config.engine.arguments, "memory_share": _server_share(config, plan.device, plan.turns)}
    return config.model_copy(update={"engine": config.engine.model_copy(update={"arguments": arguments})})


def micro_batch_s(config: TrainConfig, step: StepMemory, device: Device) -> tuple[float, float]:
    """Seconds of a rank's passes over a micro-batch: of the GPU, and of the process that launches its operations.

    The first follows the roofline of each operation, of Williams et al. 2009, with all of them one after another.
    The process launches while the GPU works, so the longer of both is the time. `device` has rates.
    """
    assert device.flop_per_s is not None
    assert device.bytes_per_s is not None
    work, fused = step.work, COMPILED_SHARE if config.compile else 1.0
    computing_s = work.flop / (ARITHMETIC_SHARE * device.flop_per_s)
    copying_s = fused * work.moved_bytes / (COPY_SHARE * device.bytes_per_s)
    if config.offload_activations:
        moments = 2 * step.gradient_bytes * (config.moments == "cpu")
        copying_s += 2 * (step.host_bytes - moments) / HOST_BYTES_PER_S
    # Ranks that share sequences share what is computed, and each launches all of it.
    return computing_s + copying_s, fused * work.num_launches * PASS_LAUNCH_S * config.parallel.same_sequences


def _times(
    config: RunConfig, device: Device, hugging_face: Any, step: StepMemory, longest: int, prompt_tokens: int
) -> Mapping[str, Any]:
    """A plan's fields about times, if every response is as long as it may be; none for an unknown device."""
    # The data sheets' arithmetic is that of bfloat16; float32 is several times slower.
    if device.flop_per_s is None or device.bytes_per_s is None or config.train.dtype != "bfloat16":
        return {}
    # Passes without gradient are a third of the work of one with.
    passes = config.train.epochs + num_forward(config.train) / 3
    micro_s, launching_s = micro_batch_s(config.train, step, device)
    train_rate = step.tokens / max(micro_s, launching_s) / passes * config.train.ranks
    gradients = step.gradient_bytes / (config.train.ranks // config.train.parallel.replicas)
    kept = gradients + sum(step.parts.get(name, 0) for name in ("weights", "moments"))
    # All of it is read once and written once.
    optimizer_s = 2 * kept / device.bytes_per_s
    if config.train.moments == "cpu" or config.train.parallel.offload:
        # Both moments, there and back; or weights and gradients, once for each pass of a step.
        optimizer_s += 4 * gradients / HOST_BYTES_PER_S
    running, sizes = device_turns.num_running(config), hugging_face.get_text_config()
    gpus = device_turns.gpus_per_engine(config, device)
    read = device_turns.decode_bytes(config, hugging_face, step.num_parameters, longest)
    launch_s = GRAPH_LAUNCH_S if config.engine.arguments.get("cuda_graphs", True) else LAUNCH_S
    # Bound by the memory's bandwidth or by arithmetic; small kernels read little and take their time all the same.
    token_s = max(
        read / (DECODE_SHARE * device.bytes_per_s * gpus),
        2 * step.num_parameters * running / (ARITHMETIC_SHARE * device.flop_per_s * gpus),
    )
    if config.engine.name in ("transformers", "process"):
        token_s += sizes.num_hidden_layers * launch_s
    computing_s = config.batch_size * config.rollouts_per_prompt * longest / train_rate
    traffic = step_traffic(config, device, sizes, step, longest, computing_s)
    sync_bytes, sync_s = sync_cost(config, device, step)
    waits_s = [each.weights_s - each.hidden_s + each.layers_s for each in traffic.values()]
    described = ClusterConfig(
        engines=num_engines(config, of_production=True),
        slots=running,
        tokens_per_s=running / token_s,
        lengths=LengthConfig(constant=max(1, longest)),
        train_s=config.train.optimizer_steps * optimizer_s + sum(waits_s[:1]),
        # Of responses, which are what a simulation knows.
        train_tokens_per_s=train_rate * max(1, longest - prompt_tokens) / longest,
        sync_s=sync_s,
        **device_turns.turn_cost(config, device, step),
    )
    differ = config.produce.sync_weights_interval > 1 or described.sleeping > 0
    times = simulate(config, described, steps=SIMULATED_STEPS * (1 + differ))
    syncs = {"traffic": traffic, "sync_bytes": sync_bytes, "sync_s": sync_s}
    return {"times": times, "waits_for_launches": launching_s > micro_s, **syncs}
