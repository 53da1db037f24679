"""`RankWorker`: one rank of a trainer on several, with methods that take and return plain values and arrays.

It is an ordinary class: `LocalRanks` (`forebay.train.parallel.ranks`) hosts one in each of its processes, and
anything else that can construct it and call its methods (an actor) can host it as well.

::

    RankWorker(rank, world_size, init_method) : joins the process group
      .meet(config)                -> the mesh of the ranks
      .load(sources)               each reads its slices from a folder, however long that takes
      .build(settings)             -> a Learner of these
      .token_values, .update       -> results for the rank's own sequences, of the whole batch
      .copy_weights                -> the rank's blocks of the weights, in memory that engines map; or all of them
      .call                        one of these by its name, or one of the learner's: offload, begin_save, ...

Every method but the constructor is called on all ranks, with the same name and in the same order, because
they meet in collective operations; but not in those that read, `load` and `begin_resume`: a slow disk makes
no operation of others run out of time. All return; what differs by rank is said there.
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import distributed

from forebay.io.elsewhere import missing
from forebay.io.shared import Layout, lay_out, map_once, mapped
from forebay.models import precision_on
from forebay.train.batch import TrainBatch
from forebay.train.config import TrainConfig
from forebay.train.learner import Learner
from forebay.train.model.critic import Critic
from forebay.train.parallel.loading import load_sharded, make_context, make_mesh
from forebay.types import FloatArray

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""The time that the slowest rank gets to come to a collective operation."""


class RankWorker:
    """One rank: a slice of the model and the sequences that it is dealt.

    `init_method` is where the ranks meet, as ``torch.distributed`` reads it (``file:///...``,
    ``tcp://host:port``). `device` ``cuda`` means the GPU number `gpu`, or the rank's, modulo how many there
    are. Backend: nccl on GPUs, gloo elsewhere. A collective that a rank does not come to ends with
    an error on the others after `COLLECTIVE_TIMEOUT`.
    """

    def __init__(
        self, rank: int, world_size: int, init_method: str, *, device: str = "cpu", gpu: int | None = None
    ) -> None:
        self.rank = rank
        self.device = torch.device(device)
        if self.device.type == "cuda":
            self.device = torch.device("cuda", (rank if gpu is None else gpu) % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        if world_size > 1:
            distributed.init_process_group(
                "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo",
                init_method=init_method,
                rank=rank,
                world_size=world_size,
                timeout=COLLECTIVE_TIMEOUT,
                device_id=self.device if self.device.type == "cuda" else None,
            )
        self._ranks = self.device.type, world_size
        self.learner: Learner
        """The rank's slice of the trainer, from `build` on."""

    def call(self, method: str, *arguments: Any) -> Any:
        """A method of this class, or one that only its learner has."""
        owner = self if hasattr(type(self), method) else self.learner
        return getattr(owner, method)(*arguments)

    def meet(self, config: Mapping[str, Any]) -> None:
        """Let go of an earlier trainer, whose memory is needed, and make the groups of the ranks."""
        vars(self).pop("learner", None)
        self._config = TrainConfig.model_validate(config)
        parallel, is_alone = self._config.parallel, self._ranks[1] == 1
        # FSDP around one rank's whole model would cost a tenth of a small one's step.
        self._mesh = None if is_alone else make_mesh(*self._ranks, parallel)
        self._context = make_context(*self._ranks, parallel)

    def load(self, sources: Mapping[str, Any], random_state: torch.Tensor) -> None:
        """Read the models; no rank waits for another.

        `sources` say where they are (`forebay.train.parallel.learner.source_of`). `random_state` is that of
        torch's CPU generator: adapters begin with random numbers, and all ranks must draw the same."""
        train = self._config
        load = partial(
            load_sharded,
            mesh=self._mesh,
            config=train.parallel,
            precision=precision_on(self.device, train.dtype),
            device=str(self.device),
        )
        policy = sources["model"]
        if train.lora_rank == 0:
            # Trained weights are float32, and slices cannot be cast later as one rank's model is.
            policy = {**policy, "dtype": "float32"}
        models: dict[str, Any] = {"model": load(policy)}
        # Each is read anew, because slices cannot be copied from one model to another.
        reference = sources.get("ref_model")
        if reference is not None or (train.uses_reference and train.lora_rank == 0):
            models["ref_model"] = load(reference or policy)
        if train.uses_critic:
            kind = type(models["model"].base_model)
            own = {"class": f"{kind.__module__}:{kind.__qualname__}", "frozen": [], "dtype": "float32"}
            body = load({**policy, **own})
        # Where one rank draws the head of a critic (numbers that become 0), and then adapters, so does each.
        torch.set_rng_state(random_state)
        if train.uses_critic:
            models["value_model"] = Critic(body)
        self._models = models

    def build(self, settings: Mapping[str, Any]) -> tuple[dict[str, Any] | None, Layout, float]:
        """Make the trainer of the models, and its optimizers.

        Returns `Learner.adapter_config`, `Learner.sizes` laid out, and `Packer.even_length` of the model.

        `settings` are plain values, by the names that `Learner` has for them."""
        models: dict[str, Any] = vars(self).pop("_models")
        self.learner = Learner(
            **models,
            **settings,
            config=self._config,
            device=self.device,
            mesh=self._mesh,
            rank=self.rank // self._config.parallel.same_sequences,
            context=self._context,
        )
        width = models["model"].config.get_text_config().hidden_size
        return self.learner.adapter_config, lay_out(self.learner.sizes())[0], EVEN_WIDTHS * width

    def token_values(self, name: str, batch: Mapping[str, Any], images: Sequence[Any] = ()) -> FloatArray:
        """`Learner.token_values` of a batch (`TrainBatch.from_plain`); 0 on the sequences of other ranks."""
        return self.learner.token_values(name, TrainBatch.from_plain(batch, images))

    def update(self, batch: Mapping[str, Any], train_step: int, images: Sequence[Any] = ()) -> dict[str, Any]:
        """`Learner.update`; an `Update` as a dict, with the columns of the rank's own sequences."""
        return self.learner.update(TrainBatch.from_plain(batch, images), train_step)._asdict()

    def copy_weights(
        self, layout: Layout, merged: bool, again: bool, are_apart: bool, path: str, inode: int, num_bytes: int
    ) -> None:
        """Write this rank's blocks of these weights into memory of its machine.

        With `are_apart` the memory is of the first rank's machine, which writes all: ranks make them whole together.
        """
        if are_apart and self.rank:
            data = torch.empty(num_bytes, dtype=torch.uint8, device="meta")
        else:
            # The first touch of a page that is mapped anew takes longer than to fill it.
            data = (mapped if again else map_once)(path, inode, num_bytes)
        self.learner.copy_weights(layout, data, merged=merged, are_whole=are_apart)

    def adapters(self) -> dict[str, torch.Tensor] | None:
        """Copies of the adapters' weights, whole, on the CPU; rank 0 alone has them."""
        gathered_weights = {name: value.to("cpu", copy=True) for name, value in self.learner.adapters()}
        return gathered_weights if self.rank == 0 else None

    def missing(self, sizes: Mapping[str, int]) -> str | None:
        """The first of these files that this rank's machine does not see with that size."""
        return missing(sizes)

    def close(self) -> None:
        """Leave the process group."""
        vars(self).pop("learner", None)
        if distributed.is_initialized():
            distributed.destroy_process_group()


EVEN_WIDTHS = 12.0
"""`Packer.even_length` in units of the hidden size h: a usual layer makes 24 h^2 operations for a token, and
2 h L in the attention of one of L tokens, which sees half of them."""
