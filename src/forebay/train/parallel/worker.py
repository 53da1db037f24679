"""`RankWorker`: one rank of a trainer on several, with methods that take and return plain values and arrays.

It is an ordinary class: `LocalRanks` (`forebay.train.parallel.ranks`) hosts one in each of its processes, and
anything else that can construct it and call its methods (an actor) can host it as well.

::

    RankWorker(rank, world_size, init_method) : joins the process group
      .build(models, config)       -> a Learner whose weights are slices
      .token_values, .update       -> results for the rank's own sequences, of the whole batch
      .weights(bucket)             -> rank 0: whole tensors; the others: None
      .save, .resume

Every method but the constructor is called on all ranks, with the same name and in the same order, because
they meet in collective operations. All return; what differs by rank is said there.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

from forebay.train.batch import TrainBatch
from forebay.train.config import TrainConfig
from forebay.train.learner import Learner
from forebay.train.model.lora import whole_weights, without_adapters
from forebay.train.parallel.frames import from_parts
from forebay.train.parallel.sharding import buckets, gathered, shard
from forebay.types import FloatArray


class RankWorker:
    """One rank: a slice of the model and the sequences that it is dealt.

    `init_method` is where the ranks meet, as ``torch.distributed`` reads it (``file:///...``,
    ``tcp://host:port``). `device` ``cuda`` means the GPU with the rank's number, modulo how many there are.
    Backend: nccl on GPUs, gloo elsewhere. A collective that a rank does not come to ends with an error on
    the others after `timeout_s` seconds.
    """

    def __init__(
        self, rank: int, world_size: int, init_method: str, *, device: str = "cpu", timeout_s: float = 600.0
    ) -> None:
        self.rank = rank
        self.device = torch.device(device)
        if self.device.type == "cuda":
            self.device = torch.device("cuda", rank % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        distributed.init_process_group(
            "nccl" if self.device.type == "cuda" else "gloo",
            init_method=init_method,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
            device_id=self.device if self.device.type == "cuda" else None,
        )
        self._mesh = init_device_mesh(self.device.type, (world_size,))
        self._learner: Learner | None = None

    @property
    def learner(self) -> Learner:
        """The rank's slice of the trainer."""
        assert self._learner is not None, "build comes first"
        return self._learner

    def build(
        self,
        models: Mapping[str, Any],
        config: Mapping[str, Any],
        settings: Mapping[str, Any],
        random_state: torch.Tensor,
    ) -> dict[str, Any] | None:
        """Make the trainer's models and optimizers; returns `Learner.adapter_config`.

        `models` are `to_parts` of models and `settings` plain values, by the names that `Learner` has for
        them. `random_state` is that of torch's CPU generator: adapters begin with random numbers, and all
        ranks must draw the same."""
        # The memory of an earlier trainer is needed.
        self._learner = None
        built: dict[str, Any] = {name: from_parts(parts) for name, parts in models.items()}
        torch.set_rng_state(random_state)
        self._learner = Learner(
            **built,
            **settings,
            config=TrainConfig.model_validate(config),
            device=self.device,
            shard=partial(shard, mesh=self._mesh),
            rank=self.rank,
        )
        return self._learner.adapter_config

    def token_values(self, name: str, batch: Mapping[str, Any]) -> FloatArray:
        """`Learner.token_values` of a batch (`TrainBatch.to_plain`); 0 on the sequences of other ranks."""
        return self.learner.token_values(name, TrainBatch(**batch))

    def update(self, batch: Mapping[str, Any], train_step: int) -> dict[str, Any]:
        """`Learner.update`; an `Update` as a dict, with the columns of the rank's own sequences."""
        return self.learner.update(TrainBatch(**batch), train_step)._asdict()

    def num_buckets(self) -> int:
        """How many calls of `weights` make up the model."""
        return len(buckets(without_adapters(self.learner.model)))

    def weights(self, bucket: int, merged: bool = True) -> dict[str, torch.Tensor] | None:
        """Copies of one bucket's weights, whole, on the CPU; rank 0 alone has them.

        Adapters are `merged`, or left out.
        """
        base = without_adapters(self.learner.model)
        with gathered(buckets(base)[bucket]):
            if self.rank != 0:
                return None
            return {name: value.to("cpu", copy=True) for name, value in whole_weights(base, merged=merged)}

    def adapters(self) -> dict[str, torch.Tensor] | None:
        """Copies of the adapters' weights, whole, on the CPU; rank 0 alone has them."""
        gathered_weights = {name: value.to("cpu", copy=True) for name, value in self.learner.adapters()}
        return gathered_weights if self.rank == 0 else None

    def save(self, folder: str, train_step: int) -> None:
        """Write the trainer's files into the empty `folder`; rank 0 writes."""
        self.learner.save(Path(folder), train_step)

    def resume(self, folder: str) -> int:
        """Take over what `save` wrote, with any number of ranks; the number of completed train steps."""
        return self.learner.resume(Path(folder))

    def close(self) -> None:
        """Leave the process group."""
        self._learner = None
        distributed.destroy_process_group()
