"""Training on two ranks is training on one: gradients, steps, checkpoints, weights; and ranks that fail."""

import asyncio
import json
import os
import shutil
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from forebay.io.messages import Alive
from forebay.io.safe_files import DiskError, unfinished
from forebay.io.shared import MemoryFile, lay_out, views
from forebay.models import load_model
from forebay.models.starting_weights import BASE_FINGERPRINT, BaseDiffersError, fingerprint
from forebay.train import LocalRanks, RankError, TrainConfig, TrainController, controller
from forebay.train.objective.losses import POLICY_LOSSES
from forebay.train.parallel import array_messages
from forebay.train.parallel.learner import ModelFolder
from forebay.train.parallel.ranks import _attempt

pytestmark = pytest.mark.usefixtures("warm")


@pytest.fixture(scope="module")
def ranks(warm):
    """Two processes for all trainers of this file, one after the other."""
    model = LlamaForCausalLM(LlamaConfig(vocab_size=4, hidden_size=2, num_attention_heads=1, num_hidden_layers=1))
    controller = TrainController(model, TrainConfig(ranks=2), pad_token_id=0)
    yield controller._own_ranks
    controller.close()


def trainer_for(model, ranks=None, num_ranks=1, **settings):
    config = TrainConfig(**{"lr": 1e-3, "token_budget": 40, "ranks": num_ranks, **settings})
    return TrainController(model, config, pad_token_id=0, total_steps=4, seed=7, ranks=ranks)


def state(trainer, folder):
    """Everything that training changes: weights, critic, moments."""
    trainer.save(folder)
    files = sorted((folder / "model").glob("*.safetensors"))
    return saved_state(folder) | {f"file: {k}": v for file in files for k, v in load_file(file).items()}


def saved_state(folder):
    """All tensors of a checkpoint, whole, whatever number of ranks wrote them."""
    reader = HuggingFaceStorageReader(str(folder / "state"))
    found = reader.read_metadata().state_dict_metadata
    tensors = {name: torch.zeros(value.size, dtype=value.properties.dtype) for name, value in found.items()}
    load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def assert_equal_states(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        # The moments are sums of gradients; weights differ by more, because Adam magnifies rounding in tiny ones.
        tolerance = {"atol": 2e-6, "rtol": 1e-3} if "|" in name else {"atol": 1e-4, "rtol": 1e-4}
        torch.testing.assert_close(other[name], value, **tolerance, msg=f"{{}} in {name}".format)


def numbers(batch):
    return {name: value for name, value in batch.metrics.items() if not name.endswith("_s")}


GAE = {"advantage": "gae", "critic_lr": 1e-3}
CASES = [
    {"layout": "padded"},
    {"layout": "packed", "loss": "gspo", "normalization": "sequence-mean"},
    {"layout": "shared_prompt", "loss": "cispo", "normalization": 8},
    {"mini_batches": 3, "epochs": 2, "kl_coef": 0.1, "entropy_coef": 0.01, "schedule": "cosine"},
    {**GAE, "layout": "shared_prompt", "mini_batches": 2},
    {**GAE, "lora_rank": 2, "kl_coef": 0.1, "layout": "packed"},
    {"gradient_checkpointing": True, "correction": "token_tis", "weight_decay": 0.1},
    {"correction": "sequence_mask", "correction_band": (0.2, 3.0), "mini_batches": 2},
    # The first of all, so that no gradient comes to the whole first layer; and single weights of the second.
    {"frozen": ["*embed_tokens", "*layers.0", "*layers.1.*_proj"], "kl_coef": 0.1, "mini_batches": 2},
    {"frozen": ["*layers.1", "*norm*"], "gradient_checkpointing": True, "layout": "packed"},
    {**GAE, "lora_rank": 2, "frozen": ["*layers.0"]},
]


OVER_RANKS = [
    {"layout": "packed", "loss": "gspo", "normalization": "sequence-mean", "entropy_coef": 0.01},
    {**GAE, "lora_rank": 2, "kl_coef": 0.1, "mini_batches": 2, "gradient_checkpointing": True},
]
"""Each rank has half of every sequence: losses of whole sequences, a critic and adapters, which are whole."""


@pytest.mark.parametrize(("settings", "context"), [(c, 1) for c in CASES] + [(c, 2) for c in OVER_RANKS], ids=str)
def test_two_ranks_train_as_one(make_model, make_groups, ranks, tmp_path, settings, context):
    layout = {"num_ranks": 2, "parallel": {"context": context}}
    one, two = trainer_for(make_model(), **settings), trainer_for(make_model(), ranks, **layout, **settings)
    for step in range(2):
        groups = make_groups(seed=step, masked=True)
        expected, got = one.fit(groups), two.fit(groups)
        assert numbers(got) == pytest.approx(numbers(expected) | got_padding(got), rel=1e-3, abs=1e-5)
        for name in ("old_logprobs", "ref_logprobs", "values", "advantages"):
            values = getattr(expected, name)
            assert (values is None) == (getattr(got, name) is None)
            if values is not None:
                np.testing.assert_allclose(getattr(got, name), values, atol=1e-4)
    assert_equal_states(state(one, tmp_path / "one"), state(two, tmp_path / "two"))


EXPERTS = {"tensor": "experts"}


def mixture(seed=0, num_experts=4):
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "initializer_range": 0.3}
    experts = {"moe_intermediate_size": 8, "num_experts": num_experts, "num_experts_per_tok": 2}
    torch.manual_seed(seed)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, **experts))


@pytest.mark.parametrize("settings", [{}, {"gradient_checkpointing": True, "layout": "packed"}], ids=str)
def test_experts_on_two_ranks_train_as_on_one_and_resume_on_one(make_groups, ranks, tmp_path, settings):
    one = trainer_for(mixture(), **settings)
    two = trainer_for(mixture(), ranks, num_ranks=2, parallel=EXPERTS, **settings)
    one.fit(make_groups()), two.fit(make_groups())
    assert_equal_states(state(one, tmp_path / "one"), state(two, tmp_path / "two"))
    # An engine gets them whole.
    given, expected = (dict(trainer._learner.weights()) for trainer in (two, one))
    assert given.keys() == expected.keys()
    assert all(torch.allclose(given[name], value, atol=1e-4) for name, value in expected.items())
    resumed = trainer_for(mixture(seed=5), **settings)
    resumed.resume(tmp_path / "two")
    expected = two.fit(make_groups(seed=1)).metrics["train/loss"]
    assert resumed.fit(make_groups(seed=1)).metrics["train/loss"] == pytest.approx(expected, abs=1e-6)


def test_experts_that_ranks_cannot_share_out_are_refused_in_a_sentence(make_model, ranks):
    for model, says in (
        (mixture(num_experts=3), "not 3 of type 'qwen3_moe'"),
        (make_model(), "not 0 of type 'llama'"),
    ):
        with pytest.raises(ValueError, match=says):
            trainer_for(model, ranks, num_ranks=2, parallel=EXPERTS)
    with pytest.raises(ValueError, match="does not go with lora_rank"):
        trainer_for(mixture(), ranks, num_ranks=2, parallel=EXPERTS, lora_rank=2)


@pytest.mark.parametrize("parallel", [{}, EXPERTS], ids=str)
def test_two_ranks_take_the_experts_that_the_engine_chose(make_groups, ranks, parallel):
    def trainer(ranks=None, **layout):
        settings = {"layout": "packed", "mini_batches": 2, "correction": "token_tis"}
        return trainer_for(mixture(), ranks, **settings, **layout)

    found = []
    for replayed in (False, True):
        groups, random = make_groups(), np.random.default_rng(0)
        for rollout in (rollout for group in groups for rollout in group):
            if replayed:
                length = len(rollout.prompt_ids) + len(rollout.response_ids) - 1
                first = random.integers(0, 4, (length, 2, 1))
                rollout.routed_experts = np.concatenate([first, (first + 1) % 4], axis=-1).astype(np.int8)
        expected = trainer().fit(groups)
        got = trainer(ranks, num_ranks=2, parallel=parallel).fit(groups)
        assert numbers(got) == pytest.approx(numbers(expected) | got_padding(got), rel=1e-3, abs=1e-5)
        found.append(expected.old_logprobs)
    assert np.nanmax(np.abs(found[0] - found[1])) > 0.01


@pytest.mark.parametrize("layout", ["padded", "packed", "shared_prompt"])
def test_groups_without_an_advantage_cost_no_rank_a_pass(make_model, make_groups, ranks, tmp_path, layout):
    settings = {"layout": layout, "mini_batches": 2, "weight_decay": 0.1}
    one, two = trainer_for(make_model(), **settings), trainer_for(make_model(), ranks, **settings)
    for num_unsolved in (4, 1, 0):
        groups = make_groups()
        for number, group in enumerate(groups):
            for member, rollout in enumerate(group):
                rollout.reward = {"score": float(member % 2) if number < num_unsolved else 1.0}
        expected, got = one.fit(groups), two.fit(groups)
        assert numbers(got) == pytest.approx(numbers(expected) | got_padding(got), rel=1e-3, abs=1e-5)
        assert (got.metrics["train/skipped_share"] > 0.5) == (num_unsolved < 2)
    assert_equal_states(state(one, tmp_path / "one"), state(two, tmp_path / "two"))


def got_padding(batch):
    """The one measure that may differ: other packs, other padding."""
    return {"train/padding": batch.metrics["train/padding"]}


@pytest.mark.parametrize("layout", ["padded", "packed", "shared_prompt"])
def test_a_rank_without_work_takes_part(make_model, make_groups, ranks, tmp_path, layout):
    groups = make_groups(1, 3)
    settings = {**GAE, "layout": layout, "token_budget": 1000}
    one, two = trainer_for(make_model(), **settings), trainer_for(make_model(), ranks, **settings)
    batch = two.pack(groups)
    # All of the work to rank 1, in one micro-batch.
    batch.packs = [[[np.empty(0, np.int64)], [np.arange(3)]]]
    batch = two.train(two.compute_advantages(two.compute_values(batch)))
    assert numbers(batch) == pytest.approx(numbers(one.fit(groups)) | got_padding(batch), rel=1e-3, abs=1e-5)
    assert_equal_states(state(one, tmp_path / "one"), state(two, tmp_path / "two"))


@pytest.mark.parametrize("settings", [{"mini_batches": 2}, {**GAE, "lora_rank": 2}], ids=str)
@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 1)])
def test_a_checkpoint_resumes_on_another_number_of_ranks(
    make_model, make_groups, ranks, tmp_path, settings, first, second
):
    where = {1: None, 2: ranks}
    begun = trainer_for(make_model(), where[first], **settings)
    begun.fit(make_groups(seed=0))
    saved = state(begun, tmp_path / "c")
    expected = numbers(begun.fit(make_groups(seed=1)))
    other_start = make_model() if settings.get("lora_rank") else make_model(seed=5)
    resumed = trainer_for(other_start, where[second], **settings)
    resumed.resume(tmp_path / "c")
    assert resumed.train_step == 1
    assert_equal_states(saved, state(resumed, tmp_path / "again"))
    got = resumed.fit(make_groups(seed=1))
    assert numbers(got) == pytest.approx(expected | got_padding(got), rel=1e-3, abs=1e-5)


@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 1)])
def test_adapters_of_a_model_held_in_bfloat16_train_and_resume_on_another_number_of_ranks(
    make_model, make_groups, ranks, tmp_path, first, second
):
    """As runs hold it whose engines compute so: frozen weights are a slice in bfloat16, adapters float32."""
    make_model(tie_word_embeddings=False).save_pretrained(tmp_path / "model")
    source = ModelFolder(folder=tmp_path / "model", dtype=None)
    where = {1: None, 2: ranks}
    half = {"lora_rank": 2, "dtype": "bfloat16", "lr": 1e-2, "kl_coef": 0.1}
    begun, resumed = (trainer_for(source, where[number], **half) for number in (first, second))
    begun.fit(make_groups(seed=0))
    begun.save(tmp_path / "c")
    resumed.resume(tmp_path / "c")
    before, after = saved_state(tmp_path / "c"), state(resumed, tmp_path / "again")
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert {value.dtype for name, value in before.items() if name.startswith("model.")} == {torch.float32}
    expected, got = (each.fit(make_groups(seed=1)).metrics for each in (begun, resumed))
    assert got["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=0.05)
    # What is exported is the frozen weights' precision, with the adapters in it, from either number of ranks.
    assert json.loads((tmp_path / "c" / "trainer.json").read_text())["dtype"] == "bfloat16"
    one, two = (load_model(tmp_path / name / "model", dtype="bfloat16").state_dict() for name in ("c", "again"))
    assert all(torch.equal(two[name], value) for name, value in one.items())
    plain = load_model(tmp_path / "model", dtype="bfloat16").state_dict()
    assert sum(not torch.equal(plain[name], value) for name, value in one.items()) >= 7
    receivers = [Receiver(), Receiver()]
    for trainer, receiver in zip((begun, resumed), receivers, strict=True):
        asyncio.run(trainer.sync_weights(receiver))
    torch.testing.assert_close(receivers[0].weights, receivers[1].weights, atol=2e-2, rtol=2e-2)


class Receiver:
    takes_adapters = False

    async def update_weights(self, weights, model_step):
        self.weights, self.model_step = dict(weights), model_step

    async def update_adapters(self, adapters, model_step, *, config):
        self.adapters, self.config = dict(adapters), config


@pytest.mark.parametrize("parallel", [{"tensor": 2}, {"replicas": 2}, {"context": 2}, {"offload": True}], ids=str)
def test_other_layouts_of_ranks_train_as_one_and_resume_on_one(make_model, make_groups, ranks, tmp_path, parallel):
    """With tensor parallelism both ranks see all sequences; one weight is split in two ways at once."""
    layout = {"num_ranks": 2, "parallel": parallel, "mini_batches": 2}
    one, two = (make_model(num_key_value_heads=2) for _ in range(2))
    one, two = trainer_for(one, mini_batches=2), trainer_for(two, ranks, **layout)
    one.fit(make_groups()), two.fit(make_groups())
    assert_equal_states(state(one, tmp_path / "one"), saved := state(two, tmp_path / "two"))
    resumed = trainer_for(make_model(seed=5, num_key_value_heads=2), mini_batches=2)
    resumed.resume(tmp_path / "two")
    again = state(resumed, tmp_path / "again")
    assert all(torch.equal(again[name], value) for name, value in saved.items())
    expected = two.fit(make_groups(seed=1)).metrics["train/loss"]
    assert resumed.fit(make_groups(seed=1)).metrics["train/loss"] == pytest.approx(expected, abs=1e-6)


READERS = [{**GAE, "kl_coef": 0.1}, {"parallel": {"tensor": 2}}, {"lora_rank": 2}]


@pytest.mark.parametrize("settings", READERS, ids=str)
def test_a_rank_that_reads_waits_for_no_other(make_model, make_groups, ranks, tmp_path, settings):
    """So a disk may take longer than a collective operation waits: here the second rank has not even begun."""
    one, two = (make_model(num_key_value_heads=2) for _ in range(2))
    begun = trainer_for(one, **{name: value for name, value in settings.items() if name != "parallel"})
    begun.fit(make_groups())
    saved = state(begun, tmp_path / "saved")
    calls = ranks.call

    def one_by_one(method, arguments):
        if method in ("load", "begin_resume"):
            read.append(method)
            return [ranks._answer(number, method, own) for number, own in enumerate(arguments)]
        return calls(method, arguments)

    read = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "call", one_by_one)
        resumed = trainer_for(two, ranks, num_ranks=2, **settings)
        resumed.resume(tmp_path / "saved")
    assert read == ["load", "begin_resume"]
    again = state(resumed, tmp_path / "again")
    assert again.keys() == saved.keys()
    assert all(torch.equal(again[name], value) for name, value in saved.items())


def test_heads_that_cannot_be_shared_out_are_refused_in_a_sentence(make_model, ranks):
    with pytest.raises(ValueError, match="tensor = 2 does not divide the 2 heads and 1 key/value heads"):
        trainer_for(make_model(), ranks, num_ranks=2, parallel={"tensor": 2})
    with pytest.raises(ValueError, match="context = 2 does not go with 1 heads, 1 key/value heads"):
        trainer_for(make_model(num_attention_heads=1), ranks, num_ranks=2, parallel={"context": 2})
    with pytest.raises(ValueError, match=r"tensor': 2.*does not go with lora_rank"):
        TrainConfig(ranks=2, lora_rank=2, parallel={"tensor": 2})


def test_training_goes_on_while_a_checkpoint_is_written(make_model, make_groups, ranks, tmp_path):
    for where in (None, ranks):
        trainer = trainer_for(make_model(), where)
        trainer.fit(make_groups())
        expected = state(trainer, tmp_path / "before")
        trainer.begin_save(tmp_path / "beside")
        trainer.fit(make_groups(seed=1))
        assert not (tmp_path / "beside").exists()
        trainer.finish_save()
        got = saved_state(tmp_path / "beside")
        assert all(torch.equal(expected[name], value) for name, value in got.items())
        shutil.rmtree(tmp_path / "beside")


class Mapping(Receiver):
    """Takes weights through memory, as engines in other processes do."""

    takes_live_weights = True

    async def update_weights(self, weights, model_step):
        layout, num_bytes = lay_out(weights.sizes())
        self.memory = MemoryFile(num_bytes)
        weights.copy_to(layout, self.memory)
        self.weights, self.model_step = dict(views(layout, self.memory.data)), model_step


PARALLEL = [{"lora_rank": 2}, {"parallel": {"tensor": 2}}, {"parallel": {"replicas": 2}}]


@pytest.mark.parametrize("settings", [{}, *PARALLEL], ids=str)
def test_an_engine_gets_whole_merged_weights(make_model, make_groups, ranks, settings, monkeypatch):
    """However it takes them: as tensors, or through memory into which each rank writes its own, or the first all."""
    alone = {name: value for name, value in settings.items() if name != "parallel"}
    one = trainer_for(make_model(num_key_value_heads=2), **alone)
    two = trainer_for(make_model(num_key_value_heads=2), ranks, num_ranks=2, **settings)
    plain, mapped, gathered, expected = Receiver(), Mapping(), Mapping(), Receiver()
    one.fit(make_groups()), two.fit(make_groups())
    asyncio.run(one.sync_weights(expected))
    asyncio.run(two.sync_weights(plain))
    asyncio.run(two.sync_weights(mapped))
    # As ranks that are not all on this machine.
    monkeypatch.setattr(ranks, "are_apart", True)
    asyncio.run(two.sync_weights(gathered))
    # For engines in bfloat16 they are cast before they travel.
    layout, num_bytes = lay_out((name, weight.bfloat16()) for name, weight in two._learner.sizes())
    halves = MemoryFile(num_bytes), MemoryFile(num_bytes)
    for memory, ranks.are_apart in zip(halves, (False, True), strict=True):
        two._learner.copy_weights(layout, memory)
    assert torch.equal(*(memory.data for memory in halves))
    torch.testing.assert_close(plain.weights, expected.weights, atol=1e-4, rtol=1e-4)
    for got in (mapped, gathered):
        assert got.model_step == 1
        assert got.weights.keys() == plain.weights.keys()
        assert all(torch.equal(got.weights[name], value) for name, value in plain.weights.items())
    assert not hasattr(plain, "adapters")


def test_calls_from_several_threads_take_turns(make_model, ranks):
    """As of a server that comes back, and reads weights, while the trainer makes its passes."""
    learner = trainer_for(make_model(), ranks, num_ranks=2)._learner
    whole, parts = dict(learner.weights()), list(learner.sizes()) * 3

    def read(part):
        layout, num_bytes = lay_out([part])
        learner.copy_weights(layout, memory := MemoryFile(num_bytes))
        return dict(views(layout, memory.data))

    with ThreadPoolExecutor(4) as threads:
        answers = threads.map(read, parts)
    for (name, _), found in zip(parts, answers, strict=True):
        assert torch.equal(found[name], whole[name])


def test_an_engine_that_takes_adapters_gets_no_more(make_model, make_groups, ranks):
    one, two = (trainer_for(make_model(), where, lora_rank=2) for where in (None, ranks))
    got, expected = Receiver(), Receiver()
    for trainer, receiver in ((one, expected), (two, got)):
        receiver.takes_adapters = True
        trainer.fit(make_groups())
        asyncio.run(trainer.sync_weights(receiver))
    torch.testing.assert_close(got.adapters, expected.adapters, atol=1e-4, rtol=1e-4)
    assert got.config == expected.config
    assert (got.config["r"], got.config["lora_alpha"]) == (2, 4.0)
    assert not hasattr(got, "weights")


def test_the_starting_weights_of_adapters_come_whole_from_ranks(make_model, make_groups, ranks):
    trainer = trainer_for(make_model(), ranks, lora_rank=2)
    trainer.fit(make_groups())
    receiver = WantsStartingWeights()
    asyncio.run(trainer.sync_weights(receiver))
    expected = dict(make_model().named_parameters())
    assert receiver.weights.keys() == expected.keys()
    assert all(torch.equal(receiver.weights[name], value) for name, value in expected.items())
    assert (receiver.model_step, receiver.num_asked) == (0, 2)


class WantsStartingWeights(Receiver):
    takes_adapters, weights, num_asked = True, {}, 0

    async def update_adapters(self, adapters, model_step, *, config):
        self.num_asked += 1
        if fingerprint(self.weights.items()) != config[BASE_FINGERPRINT]:
            raise BaseDiffersError("others")


def test_bfloat16_weights_and_given_references_reach_the_ranks(make_model, make_groups, ranks):
    config = TrainConfig(lr=1e-3, kl_coef=0.1, **GAE)
    controllers = [
        TrainController(make_model().bfloat16(), config, pad_token_id=0, ranks=where, ref_model=make_model(seed=4))
        for where in (None, ranks)
    ]
    one, two = (c.compute_values(c.compute_ref_logprobs(c.pack(make_groups()))) for c in controllers)
    np.testing.assert_allclose(two.ref_logprobs, one.ref_logprobs, atol=1e-4)
    np.testing.assert_allclose(two.values, one.values, atol=1e-4)
    receiver = Receiver()
    asyncio.run(controllers[1].sync_weights(receiver))
    assert {value.dtype for value in receiver.weights.values()} == {torch.float32}


def test_autocast_on_two_ranks_stays_close_to_one(make_model, make_groups, ranks):
    one, two = (trainer_for(make_model(), where, dtype="bfloat16") for where in (None, ranks))
    expected, got = one.fit(make_groups()).metrics, two.fit(make_groups()).metrics
    assert got["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=0.05)


def test_what_all_ranks_refuse_is_raised_as_it_is_and_they_go_on(make_model, make_groups, ranks, tmp_path):
    trainer = trainer_for(make_model(), ranks)
    with pytest.raises(ValueError, match=r"no checkpoint at .*nowhere"):
        trainer.resume(tmp_path / "nowhere")
    batch = trainer.compute_advantages(trainer.pack(make_groups()))
    batch.advantages[:] = np.nan
    with pytest.raises(FloatingPointError, match="no weight was changed"):
        trainer.train(batch)
    assert trainer.fit(make_groups()).metrics["train/grad_norm"] > 0


def test_what_one_rank_has_and_several_have_not_says_so(make_model, ranks):
    with pytest.raises(ValueError, match=r"ranks is 3, but 2 ranks"):
        trainer_for(make_model(), ranks, num_ranks=3)
    with pytest.raises(RuntimeError, match="in the ranks' processes"):
        _ = trainer_for(make_model(), ranks).model


def test_a_disk_that_fails_one_rank_is_named(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    error = _attempt(partial((tmp_path / "file" / "part").write_text, "x"))["error"]
    ranks = LocalRanks(2)
    with pytest.raises(DiskError, match=r"a rank's files cannot be .*: '.*file/part': Not a directory"):
        raise ranks._error("finish_save", {1: tuple(error)}, [])
    assert ranks.pids == []


def test_a_rank_that_fails_alone_is_reported_with_its_traceback_and_all_are_ended():
    pool = LocalRanks(2)
    with pytest.raises(RankError, match=r"(?s)rank 1 of 2 failed in close: TypeError: .*Traceback"):
        pool.call("close", [[], ["one argument too many"]])
    assert pool.pids == []
    with pytest.raises(RankError, match="close was called, but the ranks have ended"):
        pool.call("close", [[], []])
    pool.close()


@pytest.mark.parametrize("num_bytes", [0, 1 << 24])
def test_a_frozen_rank_is_named_and_no_process_is_left(num_bytes):
    """Also one that was to be sent more than a pipe holds."""
    pool = LocalRanks(1, limit_s=1.0)
    (pid,) = pool.pids
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(RankError, match="rank 0 gave no sign of life for 1 s in begin_resume: it hangs"):
        pool.call("begin_resume", [[np.zeros(num_bytes, np.uint8)]])
    assert pool.pids == []
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_rank_at_work_gives_signs_of_life():
    ours, theirs = map(array_messages.connect, socket.socketpair())
    theirs.beat(Alive(), 0.01)
    assert [ours.receive()[0] for _ in range(3)] == [Alive()] * 3
    theirs.close()
    with pytest.raises(EOFError):
        ours.receive()
    ours.close()


def die_on_rank_1(inputs, config):
    """A loss whose process is killed while rank 0 waits for it in a collective."""
    if torch.distributed.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return POLICY_LOSSES["clipped"](inputs, config)


@contextmanager
def held_up(path):
    """`unfinished`, with a pipe in place of a file of rank 0: nothing is written until it is read."""
    with unfinished(path) as folder:
        (folder / "state").mkdir()
        os.mkfifo(folder / "state" / "shard-00000.safetensors")
        yield folder


def test_a_rank_killed_beside_an_unfinished_checkpoint_is_named_and_the_one_before_stays(
    make_model, make_groups, ranks, tmp_path, monkeypatch
):
    """The last test of the file, because it ends the processes."""
    trainer = trainer_for(make_model(), ranks)
    trainer.save(tmp_path / "c")
    monkeypatch.setattr(controller, "unfinished", held_up)
    trainer.fit(make_groups())
    trainer.begin_save(tmp_path / "c")
    pids = ranks.pids
    with ThreadPoolExecutor(1) as thread:
        finishing = thread.submit(trainer.finish_save)
        trainer.fit(make_groups(seed=1))
        assert not finishing.done()
        trainer = trainer_for(make_model(), ranks, loss=f"{__name__}:die_on_rank_1")
        with pytest.raises(RankError, match=r"rank 1 died in .*: exit code -9 \(SIGKILL\)"):
            trainer.fit(make_groups())
        with pytest.raises(RankError, match=r"rank 1 died in .*: exit code -9 \(SIGKILL\)"):
            finishing.result(60)
    one = trainer_for(make_model())
    one.resume(tmp_path / "c")
    assert one.train_step == 0
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    with pytest.raises(RankError, match="the ranks have ended"):
        trainer.fit(make_groups())
