"""Distillation from a teacher on the student's own rollouts, against the formulas in float64."""

import copy

import numpy as np
import pytest
import torch
from transformers import Lfm2Config, Lfm2ForCausalLM

from forebay.config import ConfigError
from forebay.models import load_tokenizer, resolve_model
from forebay.models.config import ModelConfig
from forebay.runs.build import build_trainer, find_teacher
from forebay.runs.config import RunConfig
from forebay.train import TrainConfig, TrainController, controller, learner
from forebay.train.batch import TrainBatch
from forebay.train.measures import TokenRecords
from forebay.train.model import forward
from forebay.train.packing import Packer
from forebay.train.parallel.learner import ModelFolder, source_of
from forebay.train.parallel.worker import RankWorker
from forebay.types import SampleParams

# One optimizer step, whose gradient is to be seen as it is.
ONE_STEP = {"max_grad_norm": 0.0, "token_budget": 40, "kl_coef": 0.7}
TEACHER = {"num_hidden_layers": 3, "hidden_size": 24, "vocab_size": 29}
"""Of another size, also in the rows that fill up its vocabulary."""


def taught_groups(make_groups):
    """Groups whose rollouts were sampled at a temperature other than 1."""
    groups = make_groups(masked=True)
    for state in (state for group in groups for state in group):
        state.sample_params = SampleParams(temperature=0.8)
    return groups


def gradients(trainer, groups):
    """Metrics of a step, and its gradient, which is not taken."""
    found = []
    parameters = list(trainer.model.parameters())
    trainer.learner._optimizer.step = lambda step: found.extend(p.grad.clone() for p in parameters) or 0.0
    return trainer.fit(groups).metrics, found


def log_shares(model, state):
    """By response token the log probabilities of all tokens, in float64 and at the rollout's temperature."""
    ids = torch.from_numpy(np.concatenate([state.prompt_ids, state.response_ids])).long()
    logits = model(input_ids=ids[None]).logits[0, len(state.prompt_ids) - 1 : -1]
    return (logits / 0.8).log_softmax(-1)


def divergence(student, teacher, num_tokens):
    """Of one position: over the teacher's likeliest tokens, and over the rest as one."""
    listed = teacher[: len(student)].topk(num_tokens).indices
    p, q = student.exp(), teacher.exp()
    total = (p[listed] * (student[listed] - teacher[listed])).sum()
    if num_tokens < len(student):
        total = total + (1 - p[listed].sum()) * ((1 - p[listed].sum()) / (1 - q[listed].sum())).log()
    return total


def formula(student, teacher, groups, estimator):
    """The loss of one step on the tokens that were generated, and the mean divergence."""
    losses, divergences = [], []
    for group in groups:
        scores = np.array([state.reward["score"] for state in group])
        for state, score in zip(group, scores, strict=True):
            mine, other = log_shares(student, state), log_shares(teacher, state).detach()
            advantage = (score - scores.mean()) / (scores.std(ddof=1) + 1e-6)
            for place in np.flatnonzero(state.response_mask):
                token = int(state.response_ids[place])
                if estimator == "advantage":
                    kl = (mine[place, token] - other[place, token]).detach()
                    losses.append(-(advantage - 0.7 * kl) * mine[place, token])
                else:
                    kl = divergence(mine[place], other[place], int(estimator[4:]))
                    losses.append(-advantage * mine[place, token] + 0.7 * kl)
                divergences.append(kl.detach())
    return torch.stack(losses).mean(), float(torch.stack(divergences).mean())


@pytest.mark.parametrize("layout", ["padded", "shared_prompt"])
@pytest.mark.parametrize("estimator", ["advantage", "top_3", "top_23"])
def test_a_step_is_the_formula_in_float64(estimator, layout, make_model, make_groups, monkeypatch):
    # Chunks of the head, as with large vocabularies.
    monkeypatch.setattr(forward, "CHUNK_ELEMENTS", 23 * 3)
    config = TrainConfig(kl_estimator=estimator, layout=layout, **ONE_STEP)
    teacher = make_model(seed=1, **TEACHER)
    trainer = TrainController(make_model(), config, pad_token_id=0, ref_model=teacher)
    metrics, found = gradients(trainer, taught_groups(make_groups))
    exact = make_model().double()
    loss, kl = formula(exact, copy.deepcopy(teacher).double(), taught_groups(make_groups), estimator)
    loss.backward()
    assert metrics["train/kl"] == pytest.approx(kl, abs=1e-5)
    for mine, parameter in zip(found, exact.parameters(), strict=True):
        # float32 against float64: processors differ in the last bits, by up to 2e-6 where gradients are near 0.
        torch.testing.assert_close(mine.double(), parameter.grad, rtol=1e-5, atol=4e-6)


def test_without_the_reward_only_the_teacher_counts(make_model, make_groups):
    config = TrainConfig(advantage="none", kl_estimator="advantage", **ONE_STEP)
    results = []
    for score in (0.0, 1.0):
        groups = taught_groups(make_groups)
        for state in (state for group in groups for state in group):
            state.reward = {"score": score * len(state.response_ids)}
        trainer = TrainController(make_model(), config, pad_token_id=0, ref_model=make_model(seed=1))
        results.append(gradients(trainer, groups)[1])
    assert any(gradient.abs().max() > 1e-3 for gradient in results[0])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_weights_of_a_correction_hold_for_the_teacher_as_for_the_reward(make_model, make_groups):
    """Twice the importance is twice the gradient of a term that is an advantage."""
    settings = {"advantage": "none", "kl_estimator": "advantage", "mini_batches": 2, **ONE_STEP}
    found = []
    for factor in (1.0, 2.0):
        trainer = TrainController(make_model(), TrainConfig(**settings), pad_token_id=0, ref_model=make_model(seed=1))
        batch = trainer.compute_advantages(trainer.pack(make_groups()))
        batch = trainer.compute_ref_logprobs(trainer.compute_old_logprobs(batch))
        batch.importance = np.full(batch.num_response_tokens, factor, np.float32)
        batch.token_weights = batch.response_mask.astype(np.float32)
        learner, (pack, *_) = trainer.learner, batch.packs[0][0]
        learner._backward(batch, pack, TokenRecords())
        found.append([parameter.grad.clone() for parameter in learner.model.parameters()])
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(2 * one, two)


def test_ranks_read_the_teacher_and_find_the_same(make_model, make_groups, tmp_path):
    teacher, config = make_model(seed=1), TrainConfig(lr=1e-3, kl_coef=1.0, kl_estimator="top_4")
    trainer = TrainController(make_model(), config, pad_token_id=0, ref_model=teacher)
    batch = trainer.compute_ref_logprobs(trainer.pack(make_groups()))
    worker = RankWorker(0, 1, f"file://{tmp_path / 'meet'}")
    try:
        models = {"model": make_model(), "ref_model": teacher}
        sources = {name: source_of(model, tmp_path / name) for name, model in models.items()}
        worker.meet(config.model_dump())
        worker.load(sources, torch.get_rng_state())
        worker.build({"pad_token_id": 0})
        plain = Packer(16384).pack_pad_dispatch(TrainBatch.from_groups(make_groups()))
        found = worker.token_values("ref_logprobs", plain.to_plain())
    finally:
        worker.close()
    np.testing.assert_allclose(found[:, 0], batch.ref_logprobs, atol=1e-5)
    np.testing.assert_allclose(found[:, 1:], batch.ref_top, atol=1e-5)


def test_a_teacher_whose_states_leak_is_refused_in_a_layout_that_suits_the_student(make_model):
    sizes = {"vocab_size": 23, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "layer_types": ["conv", "full_attention"]}
    torch.manual_seed(0)
    teacher = Lfm2ForCausalLM(Lfm2Config(**sizes, **heads))
    TrainController(make_model(), TrainConfig(**ONE_STEP), pad_token_id=0, ref_model=teacher)
    packed = TrainConfig(layout="packed", **ONE_STEP)
    with pytest.raises(ValueError, match=r"'packed' .* type 'lfm2'"):
        TrainController(make_model(), packed, pad_token_id=0, ref_model=teacher)


RUN = {
    "name": "run", "steps": 1, "batch_size": 1, "rollouts_per_prompt": 2, "device": "cpu",
    "model": {"source": "tiny", "tiny": {"hidden_size": 8, "num_layers": 1, "num_heads": 1}},
    "tasks": [{
        "name": "task", "data": {"source": "add_two_digits", "size": 4}, "judge": "exact_match",
    }],
}  # fmt: skip


@pytest.mark.parametrize("cluster", [None, {"name": "ray", "arguments": {"gpus_per_engine": 1}}])
@pytest.mark.parametrize("passes", ["bfloat16", "float32"])
def test_frozen_weights_are_held_as_the_trainers_own_device_computes(cluster, passes, monkeypatch):
    """The run's own process may see no GPU, and asks for none."""
    own = resolve_model(ModelConfig.model_validate(RUN["model"]))
    train = {"teacher": str(own), "lora_rank": 2}
    run = RunConfig.model_validate({**RUN, "train": train, "cluster": cluster, "engine": {"dtype": "bfloat16"}})
    for module in (controller, learner):
        monkeypatch.setattr(module, "precision_on", lambda device, wanted: passes)
    trainer = build_trainer(run, own, load_tokenizer(own), device="cpu")
    frozen = [weight for weight in trainer.model.parameters() if not weight.requires_grad]
    assert {weight.dtype for weight in frozen} == {getattr(torch, passes)}
    assert {weight.dtype for weight in trainer.learner.ref_model.parameters()} == {getattr(torch, passes)}


def test_a_rank_holds_the_teacher_as_it_computes(tmp_path):
    own = resolve_model(ModelConfig.model_validate(RUN["model"]))
    worker = RankWorker(0, 1, f"file://{tmp_path / 'meet'}")
    try:
        folders = {"model": ModelFolder(folder=own), "ref_model": ModelFolder(folder=own, dtype=None)}
        sources = {name: source_of(model, tmp_path) for name, model in folders.items()}
        config = TrainConfig(lr=1e-3, kl_coef=1.0, dtype="bfloat16")
        worker.meet(config.model_dump())
        worker.load(sources, torch.get_rng_state())
        worker.build({"pad_token_id": 0})
        assert next(worker.learner.ref_model.parameters()).dtype == torch.bfloat16
        assert next(worker.learner.model.parameters()).dtype == torch.float32
    finally:
        worker.close()


def test_a_teacher_with_another_vocabulary_is_refused():
    config, sizes = RUN, RUN["model"]["tiny"]
    own, other = (
        resolve_model(ModelConfig.model_validate({"source": "tiny", "tiny": tiny}))
        for tiny in (sizes, {**sizes, "alphabet": "abc"})
    )
    for folder, refused in ((own, False), (other, True)):
        run = RunConfig.model_validate({**config, "train": {"teacher": str(folder)}})
        assert (run.train.kl_coef, run.train.kl_estimator) == (1.0, "advantage")
        if refused:
            with pytest.raises(ConfigError, match="text is not aligned between vocabularies"):
                find_teacher(run, load_tokenizer(own))
        else:
            assert find_teacher(run, load_tokenizer(own)).folder == own
