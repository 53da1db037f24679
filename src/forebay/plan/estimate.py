"""Whether a run fits a device, what takes the memory, and how long a step will take: before a GPU is rented.

::

    RunConfig --> model's config (no weights), longest prompt and response
                    |--> trainer: `step_memory` -----------------+
                    |--> engine or server: weights, cache        +--> Plan: turns, total, what to change
                    '--> rates by the roofline --> ClusterConfig --> `forebay.simulation` --> step time
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError
from transformers import AutoModelForCausalLM

from forebay.agents import prompt_tools
from forebay.config import ConfigError
from forebay.models import attention, load_tokenizer, resolve_model
from forebay.models.config import TINY
from forebay.models.loading import model_config
from forebay.plan.hardware import GIB, Device, this_machine
from forebay.plan.memory import StepMemory, step_memory
from forebay.plan.turns import (
    CONTEXT_BYTES,
    cache_bytes_per_token,
    engine_itemsize,
    engines_by_place,
    in_flight,
    is_server_beside,
    memory_by_turn,
    num_engines,
    num_running,
    server_share,
)
from forebay.produce.prompts.dataset import num_prompt_tokens
from forebay.runs.config import RunConfig
from forebay.runs.rollouts import load_data, task_agent, with_alphabet, with_precisions
from forebay.simulation.cluster import ClusterConfig, LengthConfig
from forebay.simulation.prediction import simulate
from forebay.train import TrainConfig
from forebay.train.batch import TrainBatch
from forebay.train.model.forward import CHUNK_ELEMENTS

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
    advice: Sequence[str] = ()
    """Overrides, each added to those before, until the run fits; empty if it does."""
    advised_bytes: int | None = None
    """Memory with them; None: none of them is enough, or it fits."""
    train_s: float | None = None
    generation_s: float | None = None
    step_s: float | None = None
    tokens_per_step: int = 0

    @property
    def parts(self) -> Mapping[str, int]:
        """Bytes in the largest turn."""
        return max(self.turns.values(), key=lambda parts: sum(parts.values()))

    @property
    def total(self) -> int:
        """Bytes."""
        return sum(self.parts.values())

    @property
    def share(self) -> float:
        """Of the device's memory."""
        return self.total / self.device.memory_bytes

    @property
    def fits(self) -> bool:
        """Whether a run is started: plans are good to a tenth."""
        return self.share <= REFUSE_SHARE


TRAIN_SHARE, DECODE_SHARE = 0.4, 0.5
"""Attainable shares: of the arithmetic in a train step (packed, bfloat16), and of the bandwidth in decoding.
The first is usual for transformers' models on one GPU, not the best."""
HOST_BYTES_PER_S = 2.5e10
"""Between a GPU and the host's memory, by PCIe 4 with 16 lanes."""
LAUNCH_S = 0.7e-3
"""A layer of the in-process engine takes at least so long to decode a token: PyTorch launches its kernels
one by one."""
SIMULATED_STEPS = 12
WARN_SHARE, REFUSE_SHARE = 0.9, 1.1
"""Of the memory: from the first on a plan warns, above the second a run is not started."""
_SAMPLED_PROMPTS = 200


def make_plan(config: RunConfig, device: Device, *, prompt_tokens: int | None = None) -> Plan:
    """Memory and times of `config` on `device`; `prompt_tokens` left out is the longest of the data's.

    Raises:
        ConfigError: the model or the data does not fit, or the model cannot be planned.
    """
    if config.cluster is not None:
        raise ConfigError(
            "a cluster shares out the parts of a run, and plans are for one machine; leave cluster out"
        )
    if device.is_gpu and config.train.ranks > device.count:
        raise ConfigError(
            f"train.ranks = {config.train.ranks} needs as many GPUs, and {device.count} are planned with: "
            f"set train.ranks={device.count}, or name more with --gpus"
        )
    # Its prompts are long or short, and a tiny model knows their characters.
    data = load_data(config) if prompt_tokens is None or config.model.source == TINY else []
    config = _settled(with_alphabet(config, data), device)
    hugging_face = model_config(config.model, seed=config.seed)
    if prompt_tokens is None:
        prompt_tokens = _longest_prompt(config, data)
    response = max(_longest_response(config, task, hugging_face, prompt_tokens) for task in config.tasks)
    longest = prompt_tokens + response
    return _plan(config, device, hugging_face, prompt_tokens, longest)


def check_memory(config: RunConfig, device: Device | None = None) -> str | None:
    """A warning if `config` may not fit `device`; None if it fits, or if that cannot be said beforehand.

    Without a `device` it is the run's own, on this machine.

    A plan takes seconds, so none is made for models that are far too small to need one. Parts of a run on a
    cluster lie elsewhere.

    Raises:
        ConfigError: it does not fit.
    """
    if not config.check_memory or config.cluster is not None:
        return None
    device = device or this_machine(config.device)
    try:
        if _surely_fits(config, device):
            return None
        plan = make_plan(config, device)
    except NO_PLAN as error:
        # The run says what is wrong with its model or data, if anything is.
        logger.info("no plan of the memory: %s: %s", type(error).__name__, error)
        return None
    if not plan.fits:
        raise ConfigError(f"{verdict(plan)} check_memory = false starts the run anyway.")
    return None if plan.share <= WARN_SHARE else verdict(plan)


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


def _surely_fits(config: RunConfig, device: Device) -> bool:
    """By a bound that is several times too high: copies of all weights, and activations that are all kept."""
    sizes = model_config(config.model, seed=config.seed).get_text_config()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(sizes)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    own_context = getattr(sizes, "max_position_embeddings", None) or config.train.token_budget
    context = config.model.max_context or int(own_context)
    cached = (
        in_flight(config) * context * cache_bytes_per_token(config, sizes)
        if engines_by_place(config, device)[0]
        else 0
    )
    activations = config.train.token_budget * sizes.num_hidden_layers * sizes.hidden_size * _KEPT_BYTES
    activations *= config.train.ranks
    return bool(40 * num_parameters + cached + activations + 8 * CHUNK_ELEMENTS * 4 < device.memory_bytes)


_KEPT_BYTES = 400
"""Of activations, for each token, layer and number of its hidden state: plans have found 60 to 120."""


def _settled(config: RunConfig, device: Device) -> RunConfig:
    """`config` with the precision that ``auto`` stands for on `device`, whose memory may be the host's."""
    config = with_precisions(config, auto=device.precision if device.is_gpu else "float32")
    if device.is_gpu:
        return config
    # The host's memory is the one that is planned.
    here: dict[str, Any] = {"offload_activations": False}
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
    plan = Plan(
        device=device,
        turns=turns,
        num_parameters=step.num_parameters,
        longest=longest,
        **_times(config, device, hugging_face, step, longest),
    )
    if plan.share <= WARN_SHARE:
        return plan
    advice: list[str] = []
    changes: dict[str, Any] = {}
    for key, value in _remedies(config.train, longest, device):
        try:
            train = TrainConfig.model_validate(
                {
                    **config.train.model_dump(exclude_unset=True),
                    "dtype": config.train.dtype,
                    **changes,
                    key: value,
                }
            )
        except (ConfigError, ValidationError):
            # It does not go with the other settings.
            continue
        changes[key] = value
        # A smaller budget takes the place of the one before.
        advice = [f"train.{name}={str(chosen).lower()}" for name, chosen in changes.items()]
        changed = config.model_copy(update={"train": train})
        _, turns = _memory(changed, device, hugging_face, prompt_tokens, longest)
        total = max(sum(parts.values()) for parts in turns.values())
        if total <= WARN_SHARE * device.memory_bytes:
            return replace(plan, advice=advice, advised_bytes=total)
    return replace(plan, advice=advice)


def _remedies(train: TrainConfig, longest: int, device: Device) -> list[tuple[str, Any]]:
    """Settings that need less memory, the cheapest first."""
    found: list[tuple[str, Any]] = []
    if train.dtype == "float32":
        found.append(("dtype", "bfloat16"))
    if train.gradient_checkpointing not in (True, 1):
        found.append(("gradient_checkpointing", True))
    budget = train.token_budget
    while (budget := budget // 2) >= longest:
        found.append(("token_budget", budget))
    if train.moments == "float32" and device.is_gpu:
        found.append(("moments", "cpu"))
    if train.lora_rank == 0:
        found.append(("lora_rank", 32))
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
    kernel = attention.planned_attention(
        train.attention,
        hugging_face,
        is_gpu=device.is_gpu,
        precision="bfloat16" if train.dtype == "bfloat16" else "float32",
        packed=train.layout == "packed",
    )
    try:
        step = step_memory(hugging_face, config.train, batch, attention=kernel)
    except (RuntimeError, ValueError) as error:
        kind = hugging_face.model_type
        raise ConfigError(f"a train step of a model of type {kind!r} cannot be planned: {error}") from error
    return step, memory_by_turn(config, device, hugging_face, step, longest)


def _largest_batch(config: RunConfig, prompt_tokens: int, longest: int) -> TrainBatch:
    """Groups of the longest sequences, as many as fill two micro-batches at most."""
    group_size = config.rollouts_per_prompt
    enough = 2 * max(1, config.train.token_budget // longest)
    # Of one mini-batch and rank: the others come after it, or have memory of their own.
    num_groups = -(-config.batch_size // (config.train.mini_batches * config.train.ranks))
    num_groups = max(1, min(num_groups, -(-enough // group_size)))
    response = [0] * (longest - prompt_tokens)
    return TrainBatch.from_examples(
        ([group % 2] * prompt_tokens, response) for group in range(num_groups) for _ in range(group_size)
    )


def with_server_share(config: RunConfig, device: Device | None = None) -> RunConfig:
    """`config` with the share of the GPU's memory that a server beside the trainer may take, if it has none.

    In a colocated run that is what the trainer leaves free while the server generates; in a separate one,
    where both work at the same time, what it leaves free at its peak. Where no plan can be made, the server
    takes its own default.

    Raises:
        ConfigError: the model and one sequence do not fit into that.
    """
    if config.engine.arguments.get("memory_share") is not None:
        return config
    device = device or this_machine(config.device)
    if config.cluster is not None or not is_server_beside(config, device):
        return config
    try:
        plan = make_plan(config, device)
    except NO_PLAN as error:
        logger.warning("no plan for the server's memory: %s: %s", type(error).__name__, error)
        return config
    settled = _settled(config, device)
    training = plan.turns["training"].items()
    trainer = {name: size for name, size in training if name.startswith("trainer: ")}
    share = server_share(config, device, trainer)
    sizes = model_config(config.model, seed=config.seed)
    needed = plan.num_parameters * engine_itemsize(settled) + plan.longest * cache_bytes_per_token(
        settled, sizes
    )
    if share * device.memory_bytes < needed + CONTEXT_BYTES:
        raise ConfigError(
            f"the trainer leaves {share * device.memory_bytes / GIB:.3g} GiB of the GPU to the server, whose "
            f"weights and one sequence take {needed / GIB:.3g}: set engine.arguments.offload = 'all', or "
            f"train.lora_rank, or take a larger GPU"
        )
    arguments = {**config.engine.arguments, "memory_share": round(share, 3)}
    return config.model_copy(update={"engine": config.engine.model_copy(update={"arguments": arguments})})


def _times(
    config: RunConfig, device: Device, hugging_face: Any, step: StepMemory, longest: int
) -> dict[str, Any]:
    """Seconds of a step if every response were as long as it may be; nothing for an unknown device."""
    # The data sheets' arithmetic is that of bfloat16; float32 is several times slower.
    if device.flop_per_s is None or device.bytes_per_s is None or config.train.dtype != "bfloat16":
        return {}
    # Passes without gradient are a third of the work of one with.
    extra = config.train.needs_old_logprobs * (config.train.correction != "ratio") + (
        config.train.uses_reference
    )
    flop_per_token = step.flop / step.tokens * (config.train.epochs + extra / 3)
    train_rate = device.flop_per_s * TRAIN_SHARE / flop_per_token * config.train.ranks
    kept = step.gradient_bytes + sum(step.parts.get(name, 0) for name in ("weights", "moments"))
    optimizer_bytes = 2 * kept
    optimizer_s = optimizer_bytes / device.bytes_per_s
    if config.train.moments == "cpu":
        # Both moments, there and back.
        optimizer_s += 4 * step.gradient_bytes / HOST_BYTES_PER_S
    running = num_running(config)
    read = step.num_parameters * engine_itemsize(config)
    read += running * longest // 2 * cache_bytes_per_token(config, hugging_face)
    layers = hugging_face.get_text_config().num_hidden_layers
    token_s = max(
        read / (DECODE_SHARE * device.bytes_per_s),
        2 * step.num_parameters * running / (TRAIN_SHARE * device.flop_per_s),
        layers * LAUNCH_S if config.engine.name in ("transformers", "process") else 0.0,
    )
    described = ClusterConfig(
        engines=num_engines(config),
        slots=running,
        tokens_per_s=running / token_s,
        lengths=LengthConfig(constant=max(1, longest)),
        train_s=config.train.optimizer_steps * optimizer_s,
        train_tokens_per_s=train_rate,
        sync_s=step.num_parameters * engine_itemsize(config) / device.bytes_per_s,
    )
    simulated = simulate(config, described, steps=SIMULATED_STEPS)
    return {
        "train_s": simulated.training_s,
        "generation_s": simulated.generation_s,
        "step_s": simulated.step_s,
        "tokens_per_step": config.batch_size * config.rollouts_per_prompt * longest,
    }
