"""The memory of a train step, by the code that trains, with tensors that have sizes and no content.

::

    model's config, TrainConfig --Learner under FakeTensorMode--> passes over the largest micro-batches
                                                                            | every allocation, every release
                                                                            v
                                   MemoryPeak(weights, gradients, moments, logits, activations)

No formula follows the architecture: attention, chunked output head, activation checkpointing, LoRA and the
layout of the batch take what their own operations allocate, on the CPU; a GPU's kernels keep as much.
"""

import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from forebay.models import Precision
from forebay.models.config import Attention
from forebay.models.loading import auto_class
from forebay.train import TrainConfig
from forebay.train.batch import Pack, TrainBatch
from forebay.train.learner import Learner
from forebay.train.model.critic import Critic
from forebay.train.model.layers import decoder_layers
from forebay.train.packing import Packer, num_cells


@dataclass
class Work:
    """The sums of what operations do."""

    flop: int = 0
    """Floating-point operations."""
    moved_bytes: int = 0
    """Bytes that each of them reads and writes."""
    num_launches: int = 0
    """Operations that a GPU is given one by one."""


class MemoryPeak(TorchDispatchMode):
    """Counts the storages that operations make while it is open, by kind, and remembers the largest sum.

    A storage made with the `vocabulary` as its last dimension counts as logits, any other as activations,
    until `assign` says otherwise. The kind `HOST` is in another memory and no part of the sum.
    """

    def __init__(self, vocabulary: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._vocabulary = vocabulary
        self._counted: dict[int, tuple[str, int]] = {}
        self._now: Counter[str] = Counter()
        self.work = Work()
        """Of all operations so far."""
        self.host_peak = 0
        """The most bytes of kind `HOST`."""
        self.reset()

    def reset(self) -> None:
        """Forget the peak; storages that are there stay counted."""
        self._peak_total, self.peak = self._total(), self._now.copy()
        """Bytes by kind at the moment when the sum was largest."""

    def _total(self) -> int:
        return self._now.total() - self._now[HOST]

    def assign(self, tensors: Iterable[torch.Tensor], kind: str, *, times: int = 1) -> None:
        """Count the storages of these tensors, known or not, as `kind`, with `times` their bytes."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if (key := storage._cdata) not in self._counted:
                weakref.finalize(storage, self._remove, key)
            else:
                self._remove(key)
            # torch pins memory of the host in blocks of powers of two.
            size = storage.nbytes() * times
            size = 1 << (size - 1).bit_length() if kind == HOST else size
            self._counted[key] = kind, size
            self._now[kind] += size
        self.host_peak = max(self.host_peak, self._now[HOST])

    def _remove(self, key: int) -> None:
        kind, size = self._counted.pop(key)
        self._now[kind] -= size

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if count := flop_registry.get(function.overloadpacket):
            self.work.flop += count(*args, **(kwargs or {}), out_val=result)
        if not (function.is_view or function.namespace == "prim" or function.name() in _NO_WORK):
            leaves = tree_leaves((args, kwargs, result))
            self.work.moved_bytes += sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
            self.work.num_launches += 1
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self._counted:
                is_logits = tensor.ndim > 1 and tensor.shape[-1] == self._vocabulary
                self.assign([tensor], LOGITS if is_logits else ACTIVATIONS)
        if self._total() > self._peak_total:
            self.reset()
        return result


_NO_WORK = {"aten::_unsafe_view", "aten::new_empty", "aten::empty"}
"""Operations that move nothing."""


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """The most memory that a train step holds, in bytes, by what it is for, and the work it does."""

    parts: Mapping[str, int]
    """``weights``, ``gradients``, ``moments``, ``reference``, ``logits``, ``activations``: at the peak."""
    work: Work
    """Of the passes over one micro-batch, recomputation included."""
    tokens: int
    """Tokens of that micro-batch."""
    gradient_bytes: int
    """Gradients of all trained weights, whatever is there at the peak."""
    num_parameters: int
    """Parameters of the policy, adapters included."""
    num_in_experts: int
    """Those of them that are in experts."""
    num_expert_layers: int
    num_reduces: tuple[int, int]
    """All-reduces of hidden states in a pass with ``tensor`` over several ranks: forward, and backward."""
    host_bytes: int
    """Of the host's memory, where activations, moments or all of a rank's slices are kept there."""


LOGITS, ACTIVATIONS, HOST = "logits", "activations", "host"
KINDS = ("weights", "reference", "gradients", "moments", LOGITS, ACTIVATIONS)


def step_memory(
    model_config: Any,
    config: TrainConfig,
    batch: TrainBatch,
    *,
    attention: Attention = "sdpa",
    held: Precision = "float32",
    teacher: Any = None,
) -> StepMemory:
    """The peak of one optimizer step on one device and rank, whose part of a mini-batch is `batch`.

    `model_config` is transformers' config of the model. If there are several micro-batches, the largest comes
    last: it finds the gradients of the others. Importance weights are taken as computed before. `attention` is
    the kernel (`planned_attention`), whatever the config's. The policy's weights are `held` so. `teacher` is
    the config of ``train.teacher``.

    Raises:
        ValueError: the model cannot be trained so, or `batch` does not fit the token budget.
    """
    # Compiled layers keep no more than others.
    config = config.model_copy(update={"attention": attention, "compile": False})
    if config.kl_tokens:
        batch.ref_top = np.zeros((batch.num_response_tokens, 2 * config.kl_tokens), np.float32)
    packs = _largest_packs(batch, config)
    passes: Precision = "bfloat16" if config.dtype == "bfloat16" else "float32"
    times = 1
    if config.ranks > 1 and passes == "bfloat16" and config.lora_rank == 0:
        # Ranks gather weights in the precision of the passes, without autocast; their slices are float32.
        config, held, times = config.model_copy(update={"dtype": "float32"}), passes, 2
    with (
        _no_moves(),
        FakeTensorMode(allow_non_fake_inputs=True),
        MemoryPeak(model_config.get_text_config().vocab_size) as memory,
        patch.object(torch.autograd.graph, "save_on_cpu", _on_host(memory)),
        patch.object(functional, "grouped_mm", _grouped_mm),
    ):
        # Fake tensors cannot be copied, so models that the learner would copy are made once more.
        reference = None
        if teacher is not None:
            reference = _model(teacher, passes)
        elif config.uses_reference and config.lora_rank == 0:
            reference = _model(model_config, held)
        learner = Learner(
            _model(model_config, held),
            config,
            pad_token_id=0,
            # Only for schedules that fall; a rehearsal's rate is 0 in any case.
            total_steps=1,
            ref_model=reference,
            value_model=Critic(_model(model_config, held).base_model) if config.uses_critic else None,
        )
        trained = [learner.model] if learner.critic is None else [learner.model, learner.critic]
        parameters = [parameter for part in trained for parameter in part.parameters()]
        reached = _assign_parts(memory, learner, trained, times, 1 if teacher is not None else times)
        # A single micro-batch is passed before, for the moments. Of several, the others leave gradients behind.
        learner.rehearse(batch, packs if len(packs) == 1 else [])
        _give_state(memory, learner, batch, [p for p in parameters if p.requires_grad and p not in reached], times)
        memory.assign(learner.moments(), HOST if config.moments == "cpu" else "moments", times=times)
        memory.reset()
        memory.work = Work()
        # The optimizer's part comes once in a step.
        work: list[Work] = []
        learner.rehearse(batch, packs[:1], lambda: work.append(replace(memory.work)))
    parts = {kind: memory.peak[kind] for kind in KINDS if memory.peak[kind]}
    if config.ranks > 1:
        parts = _of_one_rank(parts, trained, config, times)
    host_bytes = memory.host_peak // config.parallel.context + parts.pop(HOST, 0)
    return StepMemory(
        parts=parts,
        work=work[0],
        tokens=int(batch.lengths[packs[0]].sum()),
        gradient_bytes=4 * sum(p.numel() for p in parameters if p.requires_grad),
        num_parameters=sum(parameter.numel() for parameter in learner.model.parameters()),
        num_in_experts=sum(p.numel() for name, p in learner.model.named_parameters() if ".experts." in name),
        num_expert_layers=sum(_num_bytes(part) > _num_bytes(part, ranks=2) for part in decoder_layers(learner.model)),
        num_reduces=_num_reduces(learner.model),
        host_bytes=host_bytes,
    )


def _num_reduces(model: nn.Module) -> tuple[int, int]:
    plan: Mapping[str, str] = getattr(model, "tp_plan", None) or {}
    layers = [re.sub(r"\.\d+\b", ".*", name) for name, _ in model.named_modules() if "layers." in name]
    styles = [plan.get(name, "") for name in layers]
    # A matrix that is split by its inputs gives parts of sums; by its outputs, it gets parts of a gradient.
    both = styles.count("moe_tp_experts")
    by_input, by_output = (sum(style.startswith(kind) for style in styles) for kind in ("rowwise", "colwise"))
    return by_input + both, by_output + both


def _assign_parts(
    memory: MemoryPeak, learner: Learner, trained: Sequence[nn.Module], times: int, reference_times: int
) -> set[nn.Parameter]:
    """Have weights, the reference's, and gradients once there are some, counted as what they are.

    The second are in the result from then on.
    """
    reached: set[nn.Parameter] = set()

    def reach(parameter: nn.Parameter) -> None:
        reached.add(parameter)
        assert parameter.grad is not None
        memory.assign([parameter.grad], "gradients", times=times)

    weights = (tensor for part in trained for tensor in part.state_dict().values())
    memory.assign(weights, "weights", times=times)
    if learner.ref_model is not None:
        memory.assign(learner.ref_model.state_dict().values(), "reference", times=reference_times)
    for parameter in (p for part in trained for p in part.parameters() if p.requires_grad):
        # A gradient counts as an activation, as every new storage does, until it is complete.
        parameter.register_post_accumulate_grad_hook(reach)  # type: ignore[no-untyped-call]
    return reached


def _give_state(memory: MemoryPeak, learner: Learner, batch: TrainBatch, rest: list[nn.Parameter], times: int) -> None:
    """Give moments, and gradients, to weights that no pass has come to; a text never comes to a tower for images."""
    # The first gradients become moments.
    for _ in range(2):
        learner.rehearse(batch, [])
        for parameter in rest:
            parameter.grad = torch.zeros_like(parameter)
            memory.assign([parameter.grad], "gradients", times=times)


def _largest_packs(batch: TrainBatch, config: TrainConfig) -> list[Pack]:
    """The two largest micro-batches of `batch`, which is packed."""
    packer = Packer(config.token_budget, layout=config.layout)
    packs = packer.pack_pad_dispatch(fill_numbers(batch)).packs[0][0]
    return sorted(packs, key=lambda pack: -num_cells(batch, pack, config.layout))[:2]


def _model(model_config: Any, held: Precision = "float32") -> Any:
    return auto_class(model_config).from_config(model_config, dtype=getattr(torch, held))


def _grouped_mm(rows_ND: torch.Tensor, experts_EDF: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
    """(N, F): the rows times one of the E experts, which makes as much work and as large tensors as all do.

    torch's own refuses fake tensors in float32. It knows no autocast.
    """
    with torch.autocast(rows_ND.device.type, enabled=False):
        return rows_ND @ experts_EDF[0]


SLICED = ("weights", "reference", "gradients", "moments")
"""Parts of which a rank holds its slice."""
_TOKENS = (LOGITS, ACTIVATIONS)
"""Parts of which a rank holds those of its tokens, where a context group shares out a sequence."""


def _of_one_rank(
    parts: dict[str, int], trained: Sequence[nn.Module], config: TrainConfig, times: int
) -> dict[str, int]:
    """The share of `parts` that one of several ranks holds, and the layers that it gathers for a while.

    Its slices take so many `times` the bytes of the weights in `trained`.
    """
    # Replicas hold the same slices; of the part outside of the layers, `tensor` ranks hold the same.
    outside = sum(map(_outside_bytes, trained)) / sum(map(_num_bytes, trained))
    slices = config.ranks // config.parallel.replicas / (1 + outside * (config.parallel.num_tensor - 1))
    shares = dict.fromkeys(SLICED, slices) | dict.fromkeys(_TOKENS, config.parallel.context)
    split = {kind: -int(-parts[kind] // ranks) for kind, ranks in shares.items() if kind in parts}
    parts = parts | split | {"gathered layers": sum(_gathered_bytes(model, config, times) for model in trained)}
    if config.parallel.offload:
        # Whole, whatever is there at the device's peak.
        parts["gradients"] = int(times * sum(_num_bytes(model, trained=True) for model in trained) / slices)
        parts[HOST] = sum(parts.pop(kind, 0) for kind in SLICED)
    return parts


def _num_bytes(module: nn.Module, *, trained: bool = False, ranks: int = 1) -> int:
    """Bytes of its weights, of whose experts each of the `ranks` has some."""
    own = ((name, p.nbytes) for name, p in module.named_parameters() if p.requires_grad or not trained)
    return sum(size // ranks if ".experts." in f".{name}" else size for name, size in own)


def _outside_bytes(model: nn.Module, *, trained: bool = False) -> int:
    """Bytes of everything that is in no layer: embeddings, output head."""
    layers = sum(_num_bytes(layer, trained=trained) for layer in decoder_layers(model))
    return _num_bytes(model, trained=trained) - layers


def _gathered_bytes(model: nn.Module, config: TrainConfig, times: int) -> int:
    """Of `model` on several ranks, whole for a while (`forebay.train.parallel.loading`).

    The part outside of the layers is whole in all of a pass, the layer that computes, and the next one; and
    their gradients, until they are summed, in float32. Of a layer each of the `tensor` ranks has a part, or
    with its experts shared out, its own ones.
    """
    layers, of_gradients = decoder_layers(model), 2 * times - 1
    ranks = config.ranks // config.parallel.replicas if config.parallel.tensor == "experts" else 1
    of_layers = [(_num_bytes(layer, ranks=ranks), _num_bytes(layer, trained=True, ranks=ranks)) for layer in layers]
    largest = max((2 * size + of_gradients * trained for size, trained in of_layers), default=0)
    return _outside_bytes(model) + _outside_bytes(model, trained=True) + largest // config.parallel.num_tensor


def _on_host(memory: MemoryPeak) -> Callable[..., AbstractContextManager[object]]:
    """torch's `save_on_cpu` for a model whose device is the CPU, too, but is to be counted apart."""

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.clone()
        memory.assign([copy], HOST)
        return copy

    return lambda pin_memory: torch.autograd.graph.saved_tensors_hooks(pack, torch.clone)


def _no_moves() -> AbstractContextManager[object]:
    """While open, modules of fake tensors stay on their device and in their dtype, where a plan makes them.

    torch moves such a module by swapping each tensor with its copy, and refuses to for those that it made
    under the mode itself. Other modules of the process are moved as ever.
    """
    move: Callable[..., nn.Module] = nn.Module._apply

    def stay(module: nn.Module, function: Any, recurse: bool = True) -> nn.Module:
        if any(isinstance(parameter, FakeTensor) for parameter in module.parameters()):
            return module
        return move(module, function, recurse)

    return patch.object(nn.Module, "_apply", stay)


def fill_numbers(batch: TrainBatch) -> TrainBatch:
    """`batch` with every number that a pass may ask for; which ones they are changes no size."""
    ones_R = np.ones(batch.num_response_tokens, np.float32)
    for name in ("advantages", "returns", "values", "old_logprobs", "ref_logprobs", "importance", "token_weights"):
        setattr(batch, name, ones_R)
    return batch
