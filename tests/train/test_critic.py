import numpy as np
import pytest
import torch

from forebay.train import TrainConfig, TrainController


def trainer_for(model, **settings):
    config = TrainConfig(**{"lr": 1e-3, "advantage": "gae", "critic_lr": 1e-2, "clip": (0.2, 5.0), **settings})
    return TrainController(model, config, pad_token_id=0)


def test_the_first_values_are_zero_and_the_policy_is_not_shared(make_model, make_groups):
    trainer = trainer_for(make_model())
    batch = trainer.compute_values(trainer.pack(make_groups()))
    assert not batch.values.any()
    policy = {p.data_ptr() for p in trainer.model.parameters()}
    assert not policy & {p.data_ptr() for p in trainer.learner.critic.parameters()}


@pytest.mark.parametrize("layout", ["padded", "packed", "shared_prompt"])
def test_values_do_not_depend_on_the_layout(make_model, make_groups, layout):
    trainer = trainer_for(make_model(), layout=layout, token_budget=30)
    torch.nn.init.normal_(trainer.learner.critic.head.weight, generator=torch.Generator().manual_seed(0))
    batch = trainer.compute_values(trainer.pack(make_groups(masked=True)))
    start, prompt = batch.token_starts[5], batch.prompt_lengths[5]
    ids = torch.from_numpy(batch.input_ids[start : start + batch.lengths[5]]).long()[None]
    with torch.no_grad():
        states = trainer.learner.critic.body(input_ids=ids).last_hidden_state[0, prompt - 1 : -1]
        expected = trainer.learner.critic.head(states)[:, 0].numpy()
    mask = batch.by_sequence(batch.response_mask)[5]
    np.testing.assert_allclose(batch.by_sequence(batch.values)[5], np.where(mask, expected, 0), atol=1e-5)


def test_the_critic_learns_to_foresee_the_scores(make_model, make_groups):
    groups = make_groups(6, 2)
    for number, group in enumerate(groups):
        for state in group:
            state.reward = {"score": float(number % 2)}
    trainer = trainer_for(make_model(), discount=(1.0, 1.0))
    history = [trainer.fit(groups).metrics for _ in range(40)]
    assert history[0]["train/explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert history[-1]["train/explained_variance"] > 0.8
    assert history[-1]["train/value_loss"] < history[0]["train/value_loss"] / 4


def test_gae_advantages_are_standardized_over_the_batch_and_returns_are_not(make_model, make_groups):
    trainer = trainer_for(make_model(), discount=(1.0, 1.0))
    batch = trainer.fit(make_groups(masked=True))
    trained = batch.advantages[batch.response_mask]
    assert trained.mean() == pytest.approx(0.0, abs=1e-5)
    assert trained.std(ddof=1) == pytest.approx(1.0, abs=1e-4)
    # With lambda 1 the return of every token is the score.
    scores = batch.scores[batch.response_rows]
    assert batch.returns.tolist() == pytest.approx(np.where(batch.response_mask, scores, 0).tolist())


def test_the_critic_of_a_lora_run_has_no_adapters(make_model):
    trainer = trainer_for(make_model(), lora_rank=2)
    names = [name for name, _ in trainer.learner.critic.named_parameters()]
    assert not any("lora" in name for name in names)
    assert all(p.requires_grad for p in trainer.learner.critic.parameters())
