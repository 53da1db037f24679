"""A trainer's tensors away from their device and back: nothing is left there, nothing changes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from forebay.train import TrainConfig, TrainController
from forebay.train import learner as learner_module
from forebay.train import offload as offload_module
from forebay.train.collate import collate
from forebay.train.optimization import Optimizer
from forebay.train.parallel.sharding import own_block, to_fill


@pytest.fixture
def trainers(make_model) -> list[TrainController]:
    config = TrainConfig(lr=1e-2, kl_coef=0.1, critic_lr=1e-3, advantage="gae")
    return [TrainController(make_model(), config, pad_token_id=0) for _ in range(2)]


@pytest.mark.parametrize("weights", [False, True])
def test_moves_between_steps_change_nothing(trainers, make_groups, monkeypatch, weights) -> None:
    moving, staying = trainers
    moved: dict[str, torch.Tensor] = {}

    def move(self, name, tensor, put):
        """As the real one, with a device that is not there: what has left has no content here."""
        moved[name] = tensor.clone()
        self._kept[name] = moved[name]
        self._away.append((name, tensor.device, put))
        put(torch.full_like(tensor, torch.nan))
        return tensor.device

    monkeypatch.setattr(offload_module.Offload, "_move", move)
    for _ in range(3):
        groups = make_groups()
        for trainer in trainers:
            trainer.fit(groups)
        moving.offload(weights=weights)
        parameters = list(moving.model.parameters())
        assert all(bool(p.isnan().all()) is weights for p in parameters)
        assert all(m.isnan().all() for m in moving.learner.moments() if m.numel())
        assert any(name.startswith("critic|") for name in moved) is weights
        assert any(name.startswith("reference|") for name in moved) is weights
        moving.onload()
    for got, wanted in zip(moving.model.parameters(), staying.model.parameters(), strict=True):
        assert torch.equal(got, wanted)


def test_what_is_moved_is_on_the_host_and_is_brought_back_by_its_name() -> None:
    place = {"there": torch.ones(4)}
    offload = offload_module.Offload("meta")
    offload.offload([("moment", place["there"], lambda tensor: place.update(there=tensor))])
    assert place["there"].device.type == "meta"
    assert [(name, device.type) for name, device, _ in offload._away] == [("moment", "cpu")]
    offload._kept["moment"] = torch.full((4,), 2.0)
    offload.onload()
    assert place["there"].tolist() == [2.0] * 4
    stays = offload_module.Offload()
    stays.offload([("moment", torch.ones(1), lambda tensor: pytest.fail("it was on the host already"))])
    stays.onload()


@pytest.fixture
def half() -> Iterator[DeviceMesh]:
    """The first of two ranks, of which the other is not there."""
    distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (2,))
    finally:
        distributed.destroy_process_group()


def test_of_moments_in_slices_a_rank_moves_its_own(half: DeviceMesh) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(distribute_tensor(torch.arange(12.0).view(4, 3), half, [Shard(0)]))
    optimizer = Optimizer(model, TrainConfig(lr=1e-2))
    model.weight.grad = distribute_tensor(torch.ones(4, 3), half, [Shard(0)])
    optimizer.apply(1e-2)
    moments = {name: value for name, value in optimizer.state_tensors() if "exp" in name}
    before = {name: value.to_local().clone() for name, value in moments.items()}
    assert {tuple(value.shape) for value in before.values()} == {(2, 3)}
    offload = offload_module.Offload("meta")
    offload.offload(optimizer.places())
    assert {value.to_local().device.type for value in moments.values()} == {"meta"}
    assert {tuple(value.shape) for value in moments.values()} == {(4, 3)}, "it is a slice of the same"
    for name, kept in offload._kept.items():
        if "exp" in name:
            offload._kept[name] = before[f"weight|{name.partition('|')[2]}"].clone()
        else:
            offload._kept[name] = torch.zeros_like(kept, device="cpu")
    offload.onload()
    assert all(torch.equal(value.to_local(), before[name]) for name, value in moments.items())


@pytest.mark.parametrize("rank", range(8))
def test_a_slice_of_a_tensor_parallel_slice_is_one_block_of_the_whole(rank: int) -> None:
    """Of a weight that FSDP splits over four ranks, and tensor parallelism before it over two."""
    distributed.init_process_group("fake", rank=rank, world_size=8, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (4, 2))
        about = {"run_check": False, "shape": torch.Size([64, 3]), "stride": (3, 1)}
        local, strided = torch.full((8, 3), float(rank)), _StridedShard(0, split_factor=2)
        split = DTensor.from_local(local, mesh, [strided, Shard(0)], **about)
        assert to_fill(split) is split
        place, block = own_block(split)
        start = rank % 2 * 32 + rank // 2 * 8
        assert place == (slice(start, start + 8), slice(0, 3))
        assert block.data_ptr() == local.data_ptr()
        # Of two weights in one, of each of which a rank has a slice, there is no such block.
        fused = DTensor.from_local(local, mesh, [strided, strided], **about)
        assert to_fill(fused).placements == (Shard(0), Shard(0))
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("yields_memory", [False, True])
def test_a_trainer_leaves_nothing_cached_on_a_gpu_that_another_process_has_next(
    make_model, make_groups, monkeypatch, yields_memory
) -> None:
    """Neither where it is made nor after a step. Elsewhere it keeps its cache, as an engine may be recording."""
    events = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: events.append("emptied"))
    settle = learner_module.settle_attention
    monkeypatch.setattr(learner_module, "settle_attention", lambda *given: events.append("tried") or settle(*given))
    monkeypatch.setattr(learner_module, "_place", lambda model, device, mesh: None)
    monkeypatch.setattr(learner_module, "collate", partial(on_the_cpu, collate))
    config = TrainConfig(lr=1e-2, dtype="float32", attention="sdpa")
    for device in ("cpu", "cuda"):
        trainer = TrainController(make_model(), config, pad_token_id=0, device=device, yields_memory=yields_memory)
        events.append(f"made on {device}")
        trainer.fit(make_groups())
    emptied = ["emptied"] * yields_memory
    assert events == ["tried", "made on cpu", "tried", *emptied, "made on cuda", *emptied]


def on_the_cpu(made, *args, **given):
    return made(*args, **{**given, "device": torch.device("cpu")})
