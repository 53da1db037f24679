"""The steps and their composition: what each needs, gives and measures."""

import asyncio
import math

import numpy as np
import pytest
import torch

from forebay.train import TrainConfig, TrainController
from forebay.train.objective.losses import PolicyLoss
from forebay.types import Status


def trainer_for(model, *, seed=0, total_steps=None, **settings):
    return TrainController(
        model,
        TrainConfig(**{"lr": 1e-2, "token_budget": 40, **settings}),
        pad_token_id=0,
        seed=seed,
        total_steps=total_steps,
    )


def numbers(batch):
    """The metrics that do not depend on the clock."""
    return {name: value for name, value in batch.metrics.items() if not name.endswith("_s")}


SETTINGS = [
    {},
    {"mini_batches": 2, "epochs": 2},
    {"kl_coef": 0.1, "kl_estimator": "k2", "entropy_coef": 0.01},
    {"advantage": "gae", "critic_lr": 1e-2, "mini_batches": 2},
    {"advantage": "pass_at_2", "loss": "gspo", "normalization": "sequence-mean"},
    {"advantage": "opo", "loss": "cispo", "correction": "ratio", "layout": "shared_prompt"},
    {"correction": "token_tis"},
    {"correction": "sequence_mask", "correction_band": (0.01, 9.0), "mini_batches": 2},
    {"schedule": ("cosine", 1), "lora_rank": 2, "kl_coef": 0.1},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_fit_is_the_low_level_steps_bit_for_bit(make_model, make_groups, settings):
    high, low = (trainer_for(make_model(), total_steps=4, **settings) for _ in range(2))
    for seed in range(2):
        fitted = high.fit(make_groups(seed=seed))
        batch = low.pack(make_groups(seed=seed))
        if low.config.uses_critic:
            batch = low.compute_values(batch)
        batch = low.compute_advantages(batch)
        if low.config.needs_old_logprobs:
            batch = low.compute_old_logprobs(batch)
        if low.config.kl_coef > 0:
            batch = low.compute_ref_logprobs(batch)
        batch = low.train(batch)
        assert numbers(fitted) == numbers(batch)
    assert (high.train_step, high.model_step) == (2, 2)
    for one, other in zip(high.model.parameters(), low.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("loss", ["clipped", "gspo", "cispo"])
def test_old_logprobs_may_be_left_out_exactly_if_there_is_one_optimizer_step(make_model, make_groups, loss):
    computed, left_out = (trainer_for(make_model(), loss=loss) for _ in range(2))
    batch = computed.compute_advantages(computed.pack(make_groups()))
    batch = computed.train(computed.compute_old_logprobs(batch))
    assert numbers(batch) == numbers(left_out.fit(make_groups()))
    assert batch.metrics["train/ratio_min"] == batch.metrics["train/ratio_max"] == 1.0
    for one, other in zip(computed.model.parameters(), left_out.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("settings", "skipped"),
    [
        ({"mini_batches": 2}, "compute_old_logprobs"),
        ({"kl_coef": 0.1}, "compute_ref_logprobs"),
        ({"advantage": "gae", "critic_lr": 1e-3}, "compute_values"),
        ({}, "compute_advantages"),
    ],
)
def test_a_step_left_out_is_named(model, make_groups, settings, skipped):
    trainer = trainer_for(model, **settings)
    batch = trainer.pack(make_groups())
    for step in ("compute_old_logprobs", "compute_ref_logprobs", "compute_values"):
        if step != skipped and (step != "compute_ref_logprobs" or "kl_coef" in settings):
            batch = getattr(trainer, step)(batch) if step != "compute_values" or trainer.learner.critic else batch
    if skipped not in ("compute_advantages", "compute_values"):
        batch = trainer.compute_advantages(batch)
    with pytest.raises(ValueError, match=f"before train, the batch needs.* {skipped}"):
        trainer.train(batch)
    assert trainer.train_step == 0


def test_an_unpacked_batch_is_refused(model, make_groups):
    trainer = trainer_for(model)
    batch = trainer.pack(make_groups())
    batch.packs = []
    with pytest.raises(ValueError, match="not packed"):
        trainer.compute_old_logprobs(batch)
    with pytest.raises(ValueError, match="the batch needs pack"):
        trainer.train(trainer.compute_advantages(batch))


def test_steps_without_their_model_say_what_to_set(model, make_groups):
    trainer = trainer_for(model)
    batch = trainer.pack(make_groups())
    with pytest.raises(ValueError, match="no reference model: kl_coef is 0"):
        trainer.compute_ref_logprobs(batch)
    with pytest.raises(ValueError, match="no critic; set critic_lr"):
        trainer.compute_values(batch)


def test_gae_without_values_says_so(model, make_groups):
    trainer = trainer_for(model, advantage="gae", critic_lr=1e-3)
    with pytest.raises(ValueError, match="call compute_values before compute_advantages"):
        trainer.compute_advantages(trainer.pack(make_groups()))


def test_a_rollout_that_cannot_be_trained_on_changes_nothing(model, make_groups):
    groups = make_groups()
    groups[1][2].status = Status.FAILED
    trainer = trainer_for(model)
    with pytest.raises(ValueError, match=r"'1\.2' \(failed\)"):
        trainer.fit(groups)
    assert trainer.train_step == 0


def test_the_rollouts_own_logprobs_can_be_the_old_ones_but_must_be_known(model, make_groups):
    groups = make_groups(masked=True)
    trainer = trainer_for(model, correction="ratio")
    batch = trainer.compute_old_logprobs(trainer.pack(groups))
    mask = batch.response_mask
    assert np.array_equal(batch.old_logprobs[mask], batch.rollout_logprobs[mask])
    groups[2][1].logprobs = None
    groups[2][1].response_mask = None
    with pytest.raises(ValueError, match=r"needs the engine's logprobs, .* rollout '2\.1'"):
        trainer.fit(groups)


def test_the_mismatch_is_zero_for_the_trainers_own_logprobs_and_right_for_others(make_model, make_groups):
    groups = make_groups()
    trainer = trainer_for(make_model())
    # After the advantages, so that the passes are those of the train step to the bit.
    batch = trainer.compute_old_logprobs(trainer.compute_advantages(trainer.pack(groups)))
    own = batch.by_sequence(batch.old_logprobs)
    for state, logprobs in zip((s for g in groups for s in g), own, strict=True):
        state.logprobs = logprobs
    metrics = trainer_for(make_model()).fit(groups).metrics
    assert [metrics[f"train/mismatch_{name}"] for name in ("kl", "k1", "max")] == [0.0, 0.0, 0.0]
    for state, logprobs in zip((s for g in groups for s in g), own, strict=True):
        state.logprobs = logprobs + np.float32(0.1)
    metrics = trainer_for(make_model(), mini_batches=2, epochs=2).fit(groups).metrics
    assert metrics["train/mismatch_k1"] == pytest.approx(0.1, abs=1e-5)
    assert metrics["train/mismatch_kl"] == pytest.approx(math.exp(-0.1) - 1 + 0.1, abs=1e-5)
    assert metrics["train/mismatch_max"] == pytest.approx(0.1, abs=1e-5)


def test_no_mismatch_is_reported_where_the_engine_gave_no_logprobs(model, make_groups):
    groups = make_groups()
    for state in (state for group in groups for state in group):
        state.logprobs = None
    assert "train/mismatch_kl" not in trainer_for(model).fit(groups).metrics


def test_metrics_are_flat_numbers(model, make_groups):
    settings = {"advantage": "gae", "critic_lr": 1e-3, "kl_coef": 0.1, "mini_batches": 2}
    metrics = trainer_for(model, **settings).fit(make_groups()).metrics
    expected = """
        loss policy_loss value_loss kl entropy clip_low clip_high clip_share value_clip ratio_mean ratio_min
        ratio_max policy_kl grad_norm critic_grad_norm lr skipped_updates tokens trained_tokens sequences
        padding skipped_share score_mean score_std group_score_std equal_score_groups
        advantage_mean advantage_abs_mean
        explained_variance mismatch_kl mismatch_max mismatch_k1 ess_token ess_sequence importance_mean
        importance_max unknown_logprobs staleness_mean staleness_p95 staleness_max stale_masked
        old_logprobs_s ref_logprobs_s values_s advantages_s update_s
    """
    assert set(metrics) == {f"train/{name}" for name in expected.split()}
    assert all(type(value) is float for value in metrics.values())


def test_the_spread_of_the_groups_is_that_of_their_means(model, make_groups):
    groups = make_groups()
    means = [np.mean([state.reward["score"] for state in group]) for group in groups]
    measured = trainer_for(model).fit(groups).metrics["train/group_score_std"]
    assert measured == pytest.approx(np.std(means))
    assert measured > 0


def test_mini_batches_are_drawn_by_the_seed_and_the_step(make_model, make_groups):
    def packs(trainer):
        return [[pack.tolist() for pack in ranks[0]] for ranks in trainer.pack(make_groups()).packs]

    trainer = trainer_for(make_model(), mini_batches=2)
    first = packs(trainer)
    assert packs(trainer_for(make_model(), mini_batches=2)) == first
    assert packs(trainer_for(make_model(), mini_batches=2, seed=1)) != first
    trainer.fit(make_groups())
    assert packs(trainer) != first


def test_the_learning_rate_follows_the_schedule_by_train_step(model, make_groups):
    trainer = trainer_for(model, total_steps=3, schedule=("linear", 1), mini_batches=2, lr=0.5)
    rates = [trainer.fit(make_groups()).metrics["train/lr"] for _ in range(3)]
    assert rates == [0.5, 0.5, 0.25]


def test_probabilities_move_with_the_advantages(make_model, make_groups):
    groups = make_groups(same_prompt_length=True)
    trainer = trainer_for(make_model(), lr=1e-3)
    before = trainer.compute_old_logprobs(trainer.pack(groups)).old_logprobs
    for _ in range(5):
        batch = trainer.fit(groups)
    after = trainer.compute_old_logprobs(batch).old_logprobs
    gain = (after - before) * np.sign(batch.advantages)
    assert gain[batch.advantages != 0].mean() > 0.01


def test_the_reference_model_is_frozen_and_may_be_given(make_model, make_groups):
    trainer = trainer_for(make_model(), kl_coef=0.1)
    first = trainer.compute_ref_logprobs(trainer.pack(make_groups())).ref_logprobs
    for _ in range(2):
        trained = trainer.fit(make_groups())
    assert np.array_equal(trained.ref_logprobs, first)
    assert trained.metrics["train/kl"] > 0
    given = TrainController(make_model(), TrainConfig(kl_coef=0.1), pad_token_id=0, ref_model=make_model(seed=1))
    assert not np.allclose(given.compute_ref_logprobs(given.pack(make_groups())).ref_logprobs, first)


def test_dropout_is_off_even_if_someone_turned_training_mode_on(make_model, make_groups):
    trainer = trainer_for(make_model(attention_dropout=0.5))
    trainer.model.train()
    assert numbers(trainer.fit(make_groups())) == numbers(trainer_for(make_model()).fit(make_groups()))


def test_gradients_of_an_interrupted_step_are_forgotten(make_model, make_groups):
    trainer = trainer_for(make_model())
    batch = trainer.compute_advantages(trainer.pack(make_groups()))
    real, calls = trainer._learner._policy_loss, []

    def interrupted(inputs, config):
        calls.append(None)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(inputs, config)

    trainer._learner._policy_loss = interrupted
    with pytest.raises(KeyboardInterrupt):
        trainer.train(batch)
    trainer._learner._policy_loss = real
    assert numbers(trainer.fit(make_groups())) == numbers(trainer_for(make_model()).fit(make_groups()))


def constant_advantage(batch, config):
    return np.arange(batch.num_sequences, dtype=float)


def reinforce(inputs, config):
    nothing = torch.zeros_like(inputs.logprobs, dtype=torch.bool)
    return PolicyLoss(-inputs.logprobs * inputs.advantages, nothing, nothing)


def test_advantages_and_losses_may_be_the_users(make_model, make_groups):
    trainer = trainer_for(make_model(), advantage=f"{__name__}:constant_advantage", loss=f"{__name__}:reinforce")
    logprobs = trainer.compute_old_logprobs(trainer.pack(make_groups())).old_logprobs
    batch = trainer.fit(make_groups())
    assert batch.advantages.tolist() == batch.response_rows.astype(float).tolist()
    assert batch.metrics["train/loss"] == pytest.approx(-(batch.advantages * logprobs).mean(), rel=1e-4)


class Receiver:
    def __init__(self):
        self.weights, self.model_step = {}, None

    async def update_weights(self, weights, model_step):
        self.weights = {name: tensor.clone() for name, tensor in weights}
        self.model_step = model_step


def test_weights_are_handed_over_by_name_with_their_step(make_model, make_groups):
    trainer, receiver = trainer_for(make_model()), Receiver()
    trainer.fit(make_groups())
    asyncio.run(trainer.sync_weights(receiver))
    assert receiver.model_step == 1
    engine_model = make_model(seed=9)
    missing = engine_model.load_state_dict(receiver.weights, strict=False)
    assert missing.unexpected_keys == []
    ids = torch.tensor([[3, 4, 5]])
    assert torch.equal(engine_model(ids).logits, trainer.model(ids).logits)


def test_the_models_go_to_the_device_that_is_named(make_model, make_groups):
    settings = {"advantage": "gae", "critic_lr": 1e-3, "kl_coef": 0.1}
    trainer = TrainController(make_model(), TrainConfig(**settings), pad_token_id=0, device="meta")
    assert trainer.learner.device == torch.device("meta")
    for module in (trainer.model, trainer.learner.critic, trainer.learner.ref_model):
        assert {parameter.device.type for parameter in module.parameters()} == {"meta"}
    stays = TrainController(make_model(), TrainConfig(), pad_token_id=0)
    assert stays.learner.device == torch.device("cpu")
    stays.close()
