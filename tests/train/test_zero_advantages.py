"""Sequences that nothing in the loss reads cost no pass, and the step is that of the full pass."""

import numpy as np
import pytest
import torch

from forebay.train import TrainConfig, TrainController
from forebay.train.objective.losses import POLICY_LOSSES

EVERY = {"0", "1", "2", "3"}


def half_solved(make_groups, solved=(0, 2), **settings):
    """Four groups; in those of `solved` all scores are equal, in the others they differ."""
    groups = make_groups(masked=True, **settings)
    for number, group in enumerate(groups):
        for member, state in enumerate(group):
            state.reward = {"score": 1.0 if number in solved else float(member % 2)}
            # A sequence without any generated token is not read either.
            state.response_mask[0] = 1
    return groups


def read_all(batch, in_loss_R):
    return np.ones(batch.num_sequences, bool)


def step(model, groups, *, full=False, prepare=lambda batch: None, **settings):
    """Its gradients by optimizer step, its batch, and the groups that passes were made over."""
    config = TrainConfig(**{"lr": 1e-3, "max_grad_norm": 0.0, "token_budget": 40, **settings})
    trainer = TrainController(model, config, pad_token_id=0)
    if full:
        trainer._read_by_loss = read_all
    learner, gradients, passed = trainer.learner, [], set()
    real_step, real_collate = learner._optimizer.step, learner._collate

    def keep_gradient(train_step):
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad]).clone())
        return real_step(train_step)

    def keep_groups(batch, pack):
        passed.update(batch.rollout_ids[number].split(".")[0] for number in pack)
        return real_collate(batch, pack)

    learner._optimizer.step, learner._collate = keep_gradient, keep_groups
    batch = trainer.pack(groups)
    prepare(batch)
    return gradients, trainer.fit(batch), passed


def same_step(make_model, make_groups, **settings):
    """Check the step against one with full passes; gives its batch and the groups that it passed over."""
    gradients, batch, passed = step(make_model(), half_solved(make_groups), **settings)
    expected, other, _ = step(make_model(), half_solved(make_groups), full=True, **settings)
    torch.testing.assert_close(gradients, expected, atol=1e-6, rtol=1e-5)
    for name in ("loss", "policy_loss", "grad_norm", "skipped_updates", "trained_tokens", "advantage_mean"):
        number = other.metrics[f"train/{name}"]
        assert batch.metrics[f"train/{name}"] == pytest.approx(number, abs=1e-6, rel=1e-5), name
    return batch, passed


# Each pair of them once.
NORMALIZATIONS = {"token-mean": 0, "sequence-mean": 1, 8: 2}
LAYOUTS = ("padded", "packed", "shared_prompt")


@pytest.mark.parametrize("loss", list(POLICY_LOSSES))
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_solved_groups_cost_no_pass_and_count_in_the_denominators(make_model, make_groups, loss, normalization):
    layout = LAYOUTS[(list(POLICY_LOSSES).index(loss) + NORMALIZATIONS[normalization]) % 3]
    settings = {"loss": loss, "normalization": normalization, "layout": layout, "epochs": 2}
    batch, passed = same_step(make_model, make_groups, advantage="rloo", **settings)
    assert passed == {"1", "3"}
    solved = np.isin(batch.group_index, [0, 2])
    skipped_share = batch.lengths[solved].sum() / batch.num_tokens
    assert batch.metrics["train/skipped_share"] == pytest.approx(skipped_share)
    unknown = np.isnan(batch.old_logprobs[batch.response_mask])
    assert np.array_equal(unknown, solved[batch.response_rows[batch.response_mask]])


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "opo", "pass_at_2"])
@pytest.mark.parametrize("correction", ["ratio", "sequence_tis", "geometric_mask"])
def test_corrections_are_as_ever(make_model, make_groups, advantage, correction):
    settings = {"advantage": advantage, "normalization": "sequence-mean"}
    if correction == "geometric_mask":
        # So that some tokens are inside the band.
        settings["correction_band"] = (0.1, 3.0)
    batch, passed = same_step(make_model, make_groups, correction=correction, **settings)
    # The mask looks at all tokens once, without a gradient.
    assert passed == (EVERY if correction == "geometric_mask" else {"1", "3"})
    assert 0 < batch.metrics["train/skipped_share"] < 1
    assert batch.metrics["train/mismatch_kl"] > 0


@pytest.mark.parametrize(
    ("settings", "stale", "read"),
    [
        ({"kl_coef": 0.1}, False, EVERY),
        ({"entropy_coef": 0.01}, False, EVERY),
        ({"advantage": "gae", "critic_lr": 1e-3}, False, EVERY),
        ({"loss": f"{__name__}:own_loss"}, False, EVERY),
        ({"kl_coef": 0.1}, True, {"0", "1", "2"}),
        ({"entropy_coef": 0.01}, True, {"0", "1", "2"}),
        ({"loss": f"{__name__}:own_loss"}, True, EVERY),
        ({"mini_batches": 2}, True, {"1"}),
    ],
    # Sets are told in another order by each process.
    ids=lambda value: "".join(sorted(value)) if isinstance(value, set) else str(value),
)
def test_what_another_term_reads_is_passed(make_model, make_groups, settings, stale, read):
    def mask_last_group(batch):
        if stale:
            batch.loss_weights = (batch.group_index[batch.response_rows] != 3).astype(np.float32)

    batch, passed = same_step(make_model, make_groups, prepare=mask_last_group, **settings)
    assert passed == read
    assert (batch.metrics["train/skipped_share"] > 0) == (read != EVERY)


def own_loss(inputs, config):
    return POLICY_LOSSES["clipped"](inputs, config)


def test_advantages_that_change_after_the_old_logprobs_are_noticed(make_model, make_groups):
    trainer = TrainController(make_model(), TrainConfig(mini_batches=2), pad_token_id=0)
    batch = trainer.compute_advantages(trainer.pack(half_solved(make_groups)))
    batch = trainer.compute_old_logprobs(batch)
    batch.advantages[batch.response_mask] += 1
    with pytest.raises(ValueError, match="changed after compute_old_logprobs; then call it again"):
        trainer.train(batch)
    assert trainer.train(trainer.compute_old_logprobs(batch)).metrics["train/skipped_share"] == 0.0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_without_any_advantage_is_taken_as_ever(make_model, make_groups, layout):
    """Weights decay, and moments of earlier steps move them: the gradient is 0, and not missing."""
    trainers = []
    for full in (False, True):
        config = TrainConfig(lr=1e-2, layout=layout, weight_decay=0.1, token_budget=40)
        trainer = TrainController(make_model(), config, pad_token_id=0)
        if full:
            trainer._read_by_loss = read_all
        trainer.fit(half_solved(make_groups, solved=()))
        before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
        metrics = trainer.fit(half_solved(make_groups, solved=range(4), seed=1)).metrics
        assert metrics["train/grad_norm"] == metrics["train/loss"] == metrics["train/skipped_updates"] == 0.0
        assert metrics["train/skipped_share"] == (0.0 if full else 1.0)
        assert ("train/entropy" in metrics, "train/mismatch_kl" in metrics) == (full, full)
        after = trainer.model.parameters()
        assert all((one != other).any() for one, other in zip(before, after, strict=True))
        trainers.append(trainer)
    for one, other in zip(*(trainer.model.parameters() for trainer in trainers), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)
