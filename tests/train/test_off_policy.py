"""Importance weights, stale masks and their measures, through the real train step."""

import asyncio
import logging
import math

import numpy as np
import pytest
import torch

from forebay.engines import GenerateRequest, TransformersEngine
from forebay.train import Correction, OffPolicyError, OffPolicyGuard, TrainBatch, TrainConfig, TrainController
from forebay.train.measures import correction_measures
from forebay.train.objective.corrections import CORRECTIONS, Corrector
from forebay.train.objective.losses import batch_token_weights
from forebay.types import UNLABELED, RolloutState, SampleParams, Status

WEIGHING = [name for name, function in CORRECTIONS.items() if function is not None]
TIS = [name for name in WEIGHING if name.endswith("_tis")]


def trainer_for(model, **settings):
    return TrainController(model, TrainConfig(**{"lr": 1e-2, "token_budget": 40, **settings}), pad_token_id=0)


def states_of(groups):
    return [state for group in groups for state in group]


def own_logprobs(model, groups, **settings):
    """What `model` gives to the tokens of these groups, by rollout; to the bit if packed alike."""
    trainer = trainer_for(model, **settings)
    batch = trainer.compute_old_logprobs(trainer.pack(groups))
    return batch.by_sequence(batch.old_logprobs)


def sampled_by(model, groups, *, noise=0.0, seed=5, **settings):
    """Give the groups the logprobs of `model`, off by `noise`; environment tokens get nonsense."""
    random = np.random.default_rng(seed)
    for state, logprobs in zip(states_of(groups), own_logprobs(model, groups, **settings), strict=True):
        noisy = logprobs + random.normal(0, noise, len(logprobs)).astype(np.float32) if noise else logprobs
        state.logprobs = np.where(state.response_mask == 1, noisy, -77.0)
    return groups


def numbers(batch):
    return {name: value for name, value in batch.metrics.items() if not name.endswith("_s")}


def same_weights(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True))


# The loss


def decoupled_loss(batch, current, name, band, clip=0.2):
    """The token-mean of w x clipped(current / proximal), in plain numpy, rollout by rollout."""
    level, outside = name.split("_")
    losses = []
    columns = (current, batch.old_logprobs, batch.rollout_logprobs, batch.advantages, batch.response_mask)
    for now, proximal, behavior, advantage, mask in zip(*map(batch.by_sequence, columns), strict=True):
        logs = (proximal - np.where(np.isnan(behavior), proximal, behavior))[mask].astype(np.float64)
        pool = {"token": logs, "sequence": logs.sum(), "geometric": logs.sum() / max(1, mask.sum())}[level]
        weights = np.exp(pool) + np.zeros_like(logs)
        inside = (weights >= band[0]) & (weights <= band[1])
        weights = np.clip(weights, *band) if outside == "tis" else weights
        ratio, a = np.exp((now - proximal)[mask]), advantage[mask]
        loss = -weights * np.minimum(ratio * a, np.clip(ratio, 1 - clip, 1 + clip) * a)
        losses.append(loss if outside == "tis" else loss[inside])
    return np.concatenate(losses).mean()


@pytest.mark.parametrize("name", WEIGHING)
def test_the_loss_is_the_formula(make_model, make_groups, name):
    groups = sampled_by(make_model(), make_groups(masked=True), noise=0.3)
    states_of(groups)[3].logprobs[:] = np.nan
    band = (0.8, 1.25)
    trainer = trainer_for(make_model(), correction=name, correction_band=band, lr=1e-9)
    batch = trainer.compute_advantages(trainer.compute_old_logprobs(trainer.pack(groups)))
    current = batch.old_logprobs.copy()
    # The proximal policy differs from the current one, as it does from the second optimizer step on.
    noise = np.random.default_rng(1).normal(0, 0.2, len(current)).astype(np.float32)
    batch.old_logprobs = np.where(batch.response_mask, current + noise, 0).astype(np.float32)
    expected = decoupled_loss(batch, current, name, band)
    batch = trainer.train(batch)
    assert batch.metrics["train/policy_loss"] == pytest.approx(expected, rel=1e-4)
    assert 0 < batch.metrics["train/correction_limited"] < 1


def gradient(model, groups, *, weighted=False, **settings):
    """The gradient at the only optimizer step of one train step, and the metrics."""
    trainer = trainer_for(model, max_grad_norm=0.0, **settings)
    taken = []
    optimizer = trainer._learner._optimizer
    optimizer.step = lambda step: taken.append([p.grad.clone() for p in model.parameters()]) or 0.0
    batch = trainer.compute_old_logprobs(trainer.pack(groups))
    # The proximal policy differs from the current one; by rollout, so that layouts can be compared.
    for name, part in zip(batch.rollout_ids, batch.by_sequence(batch.old_logprobs), strict=True):
        group, member = map(int, name.split("."))
        part += np.random.default_rng([group, member]).normal(0, 0.2, len(part)).astype(np.float32)
    if weighted:
        batch.loss_weights = np.zeros(batch.num_response_tokens, np.float32)
        for name, part in zip(batch.rollout_ids, batch.by_sequence(batch.loss_weights), strict=True):
            part += np.random.default_rng([*map(int, name.split(".")), 1]).integers(0, 3, len(part)) / 2
    batch = trainer.train(trainer.compute_advantages(batch))
    (only,) = taken
    return torch.cat([part.flatten() for part in only]), batch


def formula_gradient(model, groups, batch, weigh):
    """Of the token-mean of w x clipped loss, by autograd over one rollout after the other."""
    model.zero_grad()
    losses = []
    columns = zip(
        states_of(groups), batch.by_sequence(batch.old_logprobs), batch.by_sequence(batch.advantages), strict=True
    )
    for state, proximal, advantage in columns:
        ids = torch.from_numpy(np.concatenate([state.prompt_ids, state.response_ids])).long()
        table = model(input_ids=ids[None]).logits[0, len(state.prompt_ids) - 1 : -1].log_softmax(-1)
        logprobs = table.gather(1, torch.from_numpy(state.response_ids).long()[:, None])[:, 0]
        ratio = (logprobs - torch.from_numpy(proximal)).exp()
        a = torch.from_numpy(advantage)
        loss = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
        mask = state.response_mask == 1
        weights = weigh(proximal[mask].astype(np.float64) - state.logprobs[mask])
        losses.append((loss[torch.from_numpy(mask)] * torch.from_numpy(weights))[torch.from_numpy(weights != 0)])
    torch.cat(losses).mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize(
    ("name", "weigh"),
    [
        ("token_tis", lambda logs: np.clip(np.exp(logs), 0.8, 1.25)),
        ("sequence_mask", lambda logs: np.exp(logs.sum()) * (0.8 <= np.exp(logs.sum()) <= 1.25) * np.ones(len(logs))),
    ],
)
def test_the_gradient_is_that_of_the_formula_in_every_layout(make_model, make_groups, name, weigh):
    settings = {"correction": name, "correction_band": (0.8, 1.25)}

    def groups():
        return sampled_by(make_model(), make_groups(masked=True), noise=0.2)

    first, batch = gradient(make_model(), groups(), **settings)
    expected = formula_gradient(make_model(), groups(), batch, weigh)
    torch.testing.assert_close(first, expected, atol=1e-5, rtol=1e-4)
    for layout, budget in [("padded", 14), ("packed", 14), ("packed", 500), ("shared_prompt", 40)]:
        got, other = gradient(make_model(), groups(), layout=layout, **{**settings, "token_budget": budget})
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)
        for measure in ("loss", "ess_token", "ess_sequence", "mismatch_kl", "correction_limited"):
            key = f"train/{measure}"
            assert other.metrics[key] == pytest.approx(batch.metrics[key], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("normalization", ["token-mean", "sequence-mean", 8])
def test_layouts_agree_on_masks_and_loss_weights(make_model, make_groups, normalization):
    settings = {
        "correction": "token_mask",
        "correction_band": (0.8, 1.25),
        "normalization": normalization,
        "entropy_coef": 0.01,
        "weighted": True,
    }
    results = [
        gradient(
            make_model(),
            sampled_by(make_model(), make_groups(masked=True), noise=0.2),
            layout=layout,
            token_budget=budget,
            **settings,
        )
        for layout, budget in [("padded", 500), ("padded", 14), ("packed", 30), ("shared_prompt", 40)]
    ]
    expected, batch = results[0]
    for got, other in results[1:]:
        torch.testing.assert_close(got, expected, atol=2e-6, rtol=1e-4)
        assert other.metrics["train/loss"] == pytest.approx(batch.metrics["train/loss"], abs=1e-6)
    assert 0 < batch.metrics["train/correction_limited"] < 1
    assert 0 < batch.metrics["train/stale_masked"] < 1


# The short suite has each correction, and each loss.
@pytest.mark.parametrize(
    ("name", "loss"),
    [
        pytest.param(name, loss, marks=() if loss == "clipped" or name == WEIGHING[0] else pytest.mark.soak)
        for name in WEIGHING
        for loss in ("clipped", "gspo", "cispo")
    ],
)
def test_with_behavior_equal_to_proximal_it_is_plain_ppo_to_the_bit(make_model, make_groups, name, loss):
    steps = {"mini_batches": 2, "epochs": 2}
    groups = make_groups(masked=True)
    for number, state in enumerate(states_of(groups)):
        # Each has a signal. A rollout without one gets no pass in some of these steps; the others are packed
        # differently then, and on some processors their sums differ in the last bit.
        state.reward = {"score": float(number % 2)}
        state.response_mask[0] = 1
    groups = sampled_by(make_model(), groups, **steps)
    plain, decoupled = (
        trainer_for(make_model(), loss=loss, correction=correction, **steps) for correction in ("none", name)
    )
    expected, got = plain.fit(groups), decoupled.fit(groups)
    assert got.metrics["train/correction_limited"] == 0.0
    assert got.metrics["train/correction_weight"] == 1.0
    assert numbers(expected).items() <= numbers(got).items()
    assert same_weights(plain, decoupled)


@pytest.mark.parametrize("name", TIS)
def test_truncated_weights_from_the_training_pass_are_the_same_to_the_bit(make_model, make_groups, name):
    groups = sampled_by(make_model(), make_groups(masked=True), noise=0.4)
    computed, left_out = (trainer_for(make_model(), correction=name) for _ in range(2))
    batch = computed.compute_advantages(computed.pack(groups))
    batch = computed.train(computed.compute_old_logprobs(batch))
    assert numbers(batch) == numbers(left_out.fit(groups))
    assert batch.metrics["train/correction_weight"] != 1.0
    assert same_weights(computed, left_out)


def test_unknown_logprobs_weigh_one_and_are_counted(make_model, make_groups):
    known = sampled_by(make_model(), make_groups(masked=True), noise=0.3)
    unknown = sampled_by(make_model(), make_groups(masked=True), noise=0.3)
    for one, other in zip(states_of(known), states_of(unknown), strict=True):
        half = len(one.logprobs) // 2
        other.logprobs[:half] = np.nan
    # The same weights, written out: the proximal logprob itself where it is unknown.
    for state, own in zip(states_of(known), own_logprobs(make_model(), known), strict=True):
        half = len(own) // 2
        state.logprobs[:half] = own[:half]
    trainers = [trainer_for(make_model(), correction="token_tis") for _ in range(2)]
    metrics = [trainer.fit(groups).metrics for trainer, groups in zip(trainers, (known, unknown), strict=True)]
    assert same_weights(*trainers)
    generated = np.concatenate([state.response_mask == 1 for state in states_of(unknown)])
    missing = np.concatenate([np.isnan(state.logprobs) for state in states_of(unknown)])
    assert metrics[0]["train/unknown_logprobs"] == 0.0
    assert metrics[1]["train/unknown_logprobs"] == pytest.approx(missing[generated].mean())
    nothing = make_groups()
    for state in states_of(nothing):
        state.logprobs = None
    metrics = trainer_for(make_model(), correction="sequence_mask").fit(nothing).metrics
    assert metrics["train/unknown_logprobs"] == metrics["train/correction_weight"] == 1.0
    assert not {"train/ess_token", "train/mismatch_kl"} & set(metrics)


def halve_long_ones(log_weights, index, num_sequences, band):
    lengths = np.bincount(index, minlength=num_sequences)[index]
    return Correction(np.where(lengths > 4, 0.5, 1.0), lengths > 4)


def test_a_correction_may_be_the_users(make_model, make_groups):
    groups = make_groups()
    metrics = trainer_for(make_model(), correction=f"{__name__}:halve_long_ones").fit(groups).metrics
    long = np.concatenate([np.full(n, n > 4) for n in (len(s.response_ids) for s in states_of(groups))])
    assert metrics["train/correction_limited"] == pytest.approx(long.mean())
    assert metrics["train/correction_weight"] == pytest.approx(np.where(long, 0.5, 1.0).mean())


# Stale tokens


def aged(groups, steps_of):
    """Label the tokens of each rollout by ``steps_of(its response length)``."""
    for state in states_of(groups):
        state.response_model_steps = steps_of(len(state.response_ids))
    return groups


@pytest.mark.parametrize("normalization", ["token-mean", "sequence-mean", 8])
def test_masked_stale_tokens_leave_the_loss_as_if_they_were_not_generated(make_model, make_groups, normalization):
    # In train step 4 a token of model step m has staleness 3 - m; the first half of each response is at 2.
    groups = aged(make_groups(), lambda length: np.repeat([1, 3], [length // 2, length - length // 2]))
    trainer, reference = (trainer_for(make_model(), normalization=normalization, lr=1e-3) for _ in range(2))
    trainer.train_step = reference.train_step = 3
    batch = trainer.fit(groups, stale_thresholds=2)
    for state in states_of(groups):
        state.response_mask = state.response_model_steps == 3
    expected = reference.fit(groups)
    assert same_weights(trainer, reference)
    stale = 1 - expected.response_mask.mean()
    assert batch.metrics["train/stale_masked"] == pytest.approx(stale)
    assert batch.metrics["train/staleness_max"] == 0.0
    differ = {"train/stale_masked", "train/trained_tokens"} | {n for n in batch.metrics if n.endswith("_s")}
    assert batch.metrics["train/trained_tokens"] == expected.metrics["train/trained_tokens"]
    for name in set(expected.metrics) - differ:
        assert batch.metrics[name] == expected.metrics[name], name


def test_a_rollout_that_is_stale_as_a_whole_does_not_shrink_the_step(make_model, make_groups):
    groups = aged(make_groups(), lambda length: np.full(length, 3))
    for state in groups[1]:
        state.response_model_steps = np.zeros(len(state.response_ids))
    for normalization in ("token-mean", "sequence-mean", 8):
        trainer, reference = (trainer_for(make_model(), normalization=normalization) for _ in range(2))
        trainer.train_step = reference.train_step = 3
        batch = trainer.fit(groups, stale_thresholds={"task": 3})
        expected = reference.fit([group for group in groups if group is not groups[1]])
        assert batch.metrics["train/loss"] == pytest.approx(expected.metrics["train/loss"], abs=1e-6)
        assert batch.metrics["train/grad_norm"] == pytest.approx(expected.metrics["train/grad_norm"], rel=1e-4)


def test_thresholds_are_by_task_and_unlabeled_tokens_are_fresh(make_groups):
    groups = aged(make_groups(3, 2), lambda length: np.full(length, 1))
    for state in groups[1]:
        state.task_name = "patient"
    for state in groups[2]:
        state.response_model_steps = np.full(len(state.response_ids), UNLABELED)
    batch = TrainBatch.from_groups(groups)
    batch.mask_stale(5, {"task": 3, "patient": 4})
    # "patient" comes first: groups stand in the order of task names.
    kept = [bool(part.all()) for part in batch.by_sequence(batch.in_loss)]
    assert kept == [True, True, False, False, True, True]
    assert batch.token_staleness(5).max() == 3
    with pytest.raises(ValueError, match="task 'patient' has no stale threshold"):
        batch.mask_stale(5, {"task": 3})
    with pytest.raises(ValueError, match="must be at least 1, got 0"):
        batch.mask_stale(5, 0)


def test_a_wholly_masked_batch_changes_nothing_and_says_so(make_model, make_groups, caplog):
    settings = {"weight_decay": 0.1, "advantage": "gae", "critic_lr": 1e-2, "mini_batches": 2, "kl_coef": 0.1}
    trainer = trainer_for(make_model(), **settings)
    trainer.fit(make_groups(seed=1))
    before = [p.clone() for module in (trainer.model, trainer.learner.critic) for p in module.parameters()]
    with caplog.at_level(logging.WARNING, logger="forebay.train.controller"):
        metrics = trainer.fit(make_groups(), stale_thresholds=1).metrics
    after = [p for module in (trainer.model, trainer.learner.critic) for p in module.parameters()]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert trainer.train_step == 2
    assert "train step 2 changed no weight: all of its tokens are masked (stale)" in caplog.text
    assert metrics["train/skipped_updates"] == 2.0
    assert metrics["train/stale_masked"] == 1.0
    assert metrics["train/loss"] == metrics["train/grad_norm"] == metrics["train/trained_tokens"] == 0.0
    assert all(math.isfinite(value) for name, value in metrics.items() if "explained" not in name)


def test_a_mini_batch_that_is_masked_is_skipped_alone(make_model, make_groups):
    groups = aged(make_groups(2, 1), lambda length: np.zeros(length))
    groups[1][0].response_model_steps = np.full(len(groups[1][0].response_ids), 1)
    trainer = trainer_for(make_model(), mini_batches=2, entropy_coef=0.01)
    trainer.train_step = 1
    metrics = trainer.fit(groups, stale_thresholds=1).metrics
    assert metrics["train/skipped_updates"] == 1.0
    assert metrics["train/grad_norm"] > 0


def test_everything_masked_by_the_correction_is_no_step_either(make_model, make_groups, caplog):
    groups = sampled_by(make_model(), make_groups())
    for state in states_of(groups):
        state.logprobs = state.logprobs - 9
    trainer = trainer_for(make_model(), correction="token_mask")
    metrics = trainer.fit(groups).metrics
    assert metrics["train/correction_limited"] == metrics["train/skipped_updates"] == 1.0
    assert "masked (by correction 'token_mask')" in caplog.text


def test_the_own_loss_weights_of_a_user_scale_tokens(make_model, make_groups):
    batch = TrainBatch.from_groups(make_groups(2, 2))
    weights = np.linspace(0, 2, batch.num_response_tokens).astype(np.float32)
    batch.loss_weights = weights
    got = batch_token_weights("token-mean", batch, np.arange(4))
    np.testing.assert_allclose(got, weights / (len(weights) - 1), rtol=1e-6)


def test_staleness_is_that_of_the_tokens_in_the_loss(make_model, make_groups):
    groups = aged(make_groups(), lambda length: np.arange(length) % 3)
    trainer = trainer_for(make_model())
    trainer.train_step = 4
    staleness = 4 - np.concatenate([state.response_model_steps for state in states_of(groups)])
    metrics = trainer.fit(groups, stale_thresholds=4).metrics
    kept = staleness[staleness < 4]
    assert metrics["train/staleness_mean"] == pytest.approx(kept.mean())
    assert metrics["train/staleness_p95"] == pytest.approx(np.percentile(kept, 95))
    assert metrics["train/staleness_max"] == 3.0
    assert metrics["train/stale_masked"] == pytest.approx((staleness >= 4).mean())


# The measures, with a real engine


def test_measures_by_hand():
    state = RolloutState(
        [], prompt_ids=[1], response_ids=[2, 3, 4], response_mask=[1, 0, 1], logprobs=[-1.0, -50.0, -2.0],
        status=Status.COMPLETED, reward={"score": 1.0},
    )  # fmt: skip
    other = RolloutState(
        [], prompt_ids=[1], response_ids=[2], logprobs=[-1.0], status=Status.COMPLETED, reward={"score": 0.0}
    )
    batch = TrainBatch.from_groups([[state, other]])
    tokens = np.flatnonzero(batch.response_mask)
    proximal = np.array([-1.0 + math.log(2), -2.0 - math.log(2), -1.0], np.float32)
    got = correction_measures(Corrector("token_tis", (0.0, 1.5)), batch, proximal, tokens)
    # Weights 2, 1/2 and 1 by token; 1 and 1 by rollout.
    assert got == pytest.approx(
        {
            "train/unknown_logprobs": 0.0,
            "train/ess_token": 3.5**2 / (3 * 5.25),
            "train/ess_sequence": 1.0,
            "train/importance_mean": 3.5 / 3,
            "train/importance_max": 2.0,
            "train/mismatch_k1": 0.0,
            "train/mismatch_kl": 0.5 / 3,
            "train/mismatch_max": math.log(2),
            "train/correction_limited": 1 / 3,
            "train/correction_weight": 1.0,
        },
        rel=1e-6,
        abs=1e-7,
    )


async def generate(engine, seed):
    """Four groups of four from the engine, at two temperatures, with scores that pull the policy about."""
    random = np.random.default_rng(seed)

    async def rollout(group, member, prompt):
        params = SampleParams(max_tokens=10, temperature=0.7 if member % 2 else 1.0)
        done = await engine.generate(
            GenerateRequest(
                request_id=f"{group}.{member}", input_ids=prompt, params=params, max_tokens=10,
                seed=1000 * seed + 10 * group + member,
            )
        )  # fmt: skip
        state = RolloutState(
            [], rollout_id=f"{group}.{member}", group_id=group, task_name="task", prompt_ids=prompt,
            sample_params=params, status=Status.COMPLETED, reward={"score": float(done.response_ids[0] % 2)},
        )  # fmt: skip
        state.append(done.response_ids, logprobs=done.logprobs, model_step=done.model_steps)
        return state

    prompts = [random.integers(3, 23, random.integers(2, 6)).astype(np.int32) for _ in range(4)]
    return [
        await asyncio.gather(*(rollout(group, member, prompt) for member in range(4)))
        for group, prompt in enumerate(prompts)
    ]


async def run_of(trainer, engine, steps, *, sync):
    """A small run; the metrics of each step."""
    history = []
    try:
        for step in range(1, steps + 1):
            history.append(trainer.fit(await generate(engine, step)).metrics)
            if sync:
                await engine.load_weights(list(trainer.model.named_parameters()), trainer.model_step)
    finally:
        await engine.close()
    return history


@pytest.mark.parametrize("correction", ["none", "token_tis", "sequence_mask"])
async def test_an_on_policy_run_with_a_real_engine_measures_no_mismatch_and_alarms_nobody(make_model, correction):
    trainer = trainer_for(make_model(), lr=3e-3, correction=correction)
    guard = OffPolicyGuard("stop", {"ess_token": 0.99, "ess_sequence": 0.99, "mismatch_kl": 1e-6, "clip_share": 0.01})
    history = await run_of(trainer, TransformersEngine(make_model()), 6, sync=True)
    for step, metrics in enumerate(history, start=1):
        assert guard.check(step, metrics).action == "none"
        assert metrics["train/ess_token"] == pytest.approx(1, abs=1e-6)
        assert metrics["train/ess_sequence"] == pytest.approx(1, abs=1e-6)
        assert metrics["train/mismatch_max"] < 1e-4
        assert 0 <= metrics["train/mismatch_kl"] < 1e-9
        assert metrics["train/staleness_max"] == metrics["train/unknown_logprobs"] == 0.0
        assert metrics.get("train/correction_limited", 0.0) == 0.0


def judge_all(guard, history):
    return [guard.check(step, metrics).action for step, metrics in enumerate(history, start=1)]


async def test_an_engine_that_never_gets_the_weights_is_noticed(make_model):
    trainer = trainer_for(make_model(), lr=2e-2)
    history = await run_of(trainer, TransformersEngine(make_model()), 12, sync=False)
    assert history[0]["train/mismatch_kl"] < 1e-9
    assert [metrics["train/staleness_max"] for metrics in history] == list(range(12))
    assert history[-1]["train/ess_token"] < history[1]["train/ess_token"] < 1
    assert "lower_lag" in judge_all(OffPolicyGuard("lower_lag"), history)
    with pytest.raises(OffPolicyError, match="mismatch_kl"):
        judge_all(OffPolicyGuard("stop"), history)
