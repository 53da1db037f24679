"""The gradient of a train step is that of the formula, however the batch is cut, laid out or ordered."""

import numpy as np
import pytest
import torch

from forebay.train import TrainConfig, TrainController

BASE = {"lr": 1e-3, "max_grad_norm": 0.0}


def gradient(model, groups, monkeypatch=None, *, old_noise=0.0, **changes):
    """The gradient at the optimizer step of one `fit`, and the metrics."""
    trainer = TrainController(model, TrainConfig(**{**BASE, **changes}), pad_token_id=0)
    taken = []
    optimizer = trainer._learner._optimizer
    optimizer.step = lambda step: taken.append([p.grad.clone() for p in model.parameters()]) or 0.0
    batch = trainer.compute_advantages(trainer.pack(groups))
    batch = trainer.compute_old_logprobs(batch)
    if old_noise:
        # By rollout id, so that every order and layout gets the same noise.
        for name, part in zip(batch.rollout_ids, batch.by_sequence(batch.old_logprobs), strict=True):
            group, member = map(int, name.split("."))
            part += np.random.default_rng([group, member]).normal(0, old_noise, len(part)).astype(np.float32)
    if trainer.config.kl_coef:
        batch = trainer.compute_ref_logprobs(batch)
        batch.ref_logprobs = batch.ref_logprobs - 0.3
    batch = trainer.train(batch)
    (only,) = taken
    return torch.cat([part.flatten() for part in only]), batch


def reference(model, groups, normalization, low=0.2, high=0.2, kl_coef=0.0, entropy_coef=0.0):
    """Clipped GRPO, k3 penalty, entropy bonus, naively; old = current, reference = old - 0.3."""
    losses = []
    for group in groups:
        scores = np.array([state.reward["score"] for state in group])
        deviation = scores.std(ddof=1) + 1e-6
        for state, score in zip(group, scores, strict=True):
            ids = torch.from_numpy(np.concatenate([state.prompt_ids, state.response_ids])).long()
            table = model(input_ids=ids[None]).logits[0, len(state.prompt_ids) - 1 : -1].log_softmax(-1)
            logprobs = table.gather(1, torch.from_numpy(state.response_ids).long()[:, None])[:, 0]
            ratio = (logprobs - logprobs.detach()).exp()
            advantage = (score - scores.mean()) / deviation
            loss = -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
            gap = logprobs.detach() - 0.3 - logprobs
            loss = loss + kl_coef * (gap.exp() - 1 - gap) + entropy_coef * (table.exp() * table).sum(-1)
            losses.append(loss[torch.from_numpy(state.response_mask).bool()])
    total = {
        "token-mean": lambda: torch.cat(losses).mean(),
        "sequence-mean": lambda: torch.stack([loss.mean() for loss in losses if len(loss)]).mean(),
        8: lambda: torch.stack([loss.sum() / 8 for loss in losses]).mean(),
    }[normalization]()
    model.zero_grad()
    total.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()]), float(total.detach())


@pytest.mark.parametrize("normalization", ["token-mean", "sequence-mean", 8])
@pytest.mark.parametrize(("kl_coef", "entropy_coef"), [(0.0, 0.0), (0.1, 0.02)])
def test_a_train_step_has_the_gradient_of_the_formula(make_model, make_groups, normalization, kl_coef, entropy_coef):
    groups, model = make_groups(masked=True), make_model()
    settings = {"normalization": normalization, "kl_coef": kl_coef, "entropy_coef": entropy_coef}
    expected, loss = reference(model, groups, **settings)
    got, batch = gradient(make_model(), groups, token_budget=30, **settings)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)
    assert batch.metrics["train/loss"] == pytest.approx(loss, abs=1e-5)


LOSSES, NORMALIZATIONS = ("clipped", "gspo", "cispo"), ("token-mean", "sequence-mean", 8)


# The short suite has each loss with one normalization.
@pytest.mark.parametrize(
    ("loss", "normalization"),
    [
        pytest.param(loss, normalization, marks=() if row == column else pytest.mark.soak)
        for row, loss in enumerate(LOSSES)
        for column, normalization in enumerate(NORMALIZATIONS)
    ],
)
def test_micro_batches_layouts_and_order_do_not_change_the_gradient(make_model, make_groups, loss, normalization):
    settings = {"loss": loss, "normalization": normalization, "old_noise": 0.2}
    expected, batch = gradient(make_model(), make_groups(masked=True), **settings)
    for layout, budget in [("padded", 14), ("padded", 40), ("packed", 14), ("packed", 500), ("shared_prompt", 40)]:
        for groups in (make_groups(masked=True), make_groups(masked=True)[::-1]):
            got, other = gradient(make_model(), groups, layout=layout, token_budget=budget, **settings)
            torch.testing.assert_close(got, expected, atol=2e-6, rtol=1e-4)
            assert other.metrics["train/loss"] == pytest.approx(batch.metrics["train/loss"], abs=1e-6)


def test_the_order_of_the_groups_does_not_change_a_bit(make_model, make_groups):
    one, _ = gradient(make_model(), make_groups())
    other, _ = gradient(make_model(), make_groups()[::-1])
    assert torch.equal(one, other)


def test_masked_tokens_contribute_nothing(make_model, make_groups):
    groups = make_groups(masked=True)
    expected, _ = gradient(make_model(), groups, entropy_coef=0.01)
    for group in groups:
        for state in group:
            # What the engine said about tokens that it did not generate must not matter.
            state.logprobs = np.where(state.response_mask == 1, state.logprobs, -50.0)
    again, batch = gradient(make_model(), groups, entropy_coef=0.01)
    assert torch.equal(again, expected)
    assert batch.metrics["train/trained_tokens"] == sum(s.response_mask.sum() for g in groups for s in g)
    for name in ("advantages", "old_logprobs"):
        assert not getattr(batch, name)[~batch.response_mask].any()


def test_autocast_stays_close_and_computes_the_loss_in_float32(make_model, make_groups):
    exact, _ = gradient(make_model(), make_groups())
    rough, batch = gradient(make_model(), make_groups(), dtype="bfloat16")
    assert rough.dtype == torch.float32
    assert 0 < (rough - exact).norm() / exact.norm() < 0.1
    assert batch.metrics["train/ratio_max"] == pytest.approx(1.0, abs=1e-6)
