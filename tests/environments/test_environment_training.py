"""PPO and the scales beside it."""

import numpy as np
import pytest
import torch
from environment_factory import make_stepper
from hypothesis import given
from hypothesis import strategies as st

from forebay.config import ConfigError
from forebay.environments.config import EnvironmentConfig, PolicyConfig, PPOConfig
from forebay.environments.policy import Categorical, Gaussian, Policy, head_for
from forebay.environments.ppo import PPOTrainer, StepBatch
from forebay.environments.workers.stepper import spaces
from forebay.fragments import FragmentStore


def make_trainer(policy, seed=0):
    return PPOTrainer(policy, PPOConfig(lr=1e-2, epochs=2, mini_batches=2), total_steps=10, seed=seed)


def make_batch(tmp_path, stepper):
    store = FragmentStore(path=tmp_path / "store", max_bytes=1 << 24)
    ids = store.add_fragments([stepper.make_fragment() for _ in range(2)])
    return StepBatch.from_fragments(store.stack(ids), fragments_per_chunk=1)


@pytest.mark.parametrize("memory", ["none", "gru", "lstm"])
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_a_trainer_goes_on_from_its_arrays_to_the_same_weights(tmp_path, env_id, memory):
    stepper, policy = make_stepper(env_id, memory=memory)
    _, other = make_stepper(env_id, memory=memory, seed=1)
    batch = make_batch(tmp_path, stepper)
    trainer, resumed = make_trainer(policy), make_trainer(other, seed=5)
    trainer.update(batch)
    np.savez(tmp_path / "arrays.npz", **trainer.arrays())
    with np.load(tmp_path / "arrays.npz", allow_pickle=False) as arrays:
        resumed.load(trainer.step, dict(arrays))
    assert resumed.update(batch) == trainer.update(batch)
    assert resumed.policy.weights() == trainer.policy.weights()
    assert resumed.step == 2


def test_a_step_that_only_resets_teaches_nothing(tmp_path):
    stepper, policy = make_stepper(length=200, num_envs=2)
    _, twin = make_stepper(length=200, num_envs=2)
    batch = make_batch(tmp_path, stepper)
    dead = torch.from_numpy(~batch.live_SB)
    assert dead.any()
    first = make_trainer(policy).update(batch)
    batch.action_SB[dead] = 1 - batch.action_SB[dead]
    batch.logprobs_SB[dead] = -50.0
    assert make_trainer(twin).update(batch) == first
    assert twin.weights() == policy.weights()


def test_the_loss_of_stale_steps_is_weighed_down(tmp_path):
    stepper, policy = make_stepper()
    batch = make_batch(tmp_path, stepper)
    trainer = make_trainer(policy)
    fresh = trainer.update(batch)
    assert abs(fresh["lag_kl"]) < 1e-5
    for _ in range(3):
        late = trainer.update(batch)
    assert late["lag"] == 3.0
    assert late["lag_kl"] > 1e-3


def test_an_infinite_reward_is_reported_before_it_spoils_the_weights(tmp_path):
    stepper, policy = make_stepper()
    batch = make_batch(tmp_path, stepper)
    batch.reward_SB[0, 0] = np.inf
    before = [parameter.clone() for parameter in policy.actor.parameters()]
    with pytest.raises(FloatingPointError, match="train step 1"):
        make_trainer(policy).update(batch)
    assert all(torch.equal(a, b) for a, b in zip(before, policy.actor.parameters(), strict=True))


@given(st.integers(0, 2**32 - 1), st.integers(0, 40))
def test_rescaling_changes_the_scale_and_not_the_values(seed, step):
    torch.manual_seed(seed)
    policy = Policy(4, Categorical(2), PolicyConfig(hidden_size=8))
    features = torch.randn(20, 4)
    before = policy.values(features).detach()
    policy.rescale_values(50 + 10 * torch.randn(100), step)
    torch.testing.assert_close(policy.values(features).detach(), before, rtol=1e-4, atol=1e-3)
    if step == 0:
        assert policy.value_mean == pytest.approx(50, abs=5)
        assert policy.value_std == pytest.approx(10, abs=4)


def test_observations_are_scaled_by_all_that_were_trained_on(tmp_path):
    stepper, policy = make_stepper(length=50)
    trainer, rows = make_trainer(policy), []
    for _ in range(3):
        batch = make_batch(tmp_path, stepper)
        batch.obs_SBD[..., 0] = 3.0
        trainer.update(batch)
        rows.append(batch.obs_SBD[:-1].double().numpy()[batch.live_SB])
    seen = np.concatenate(rows)
    np.testing.assert_allclose(policy.obs_mean, seen.mean(0), rtol=1e-5, atol=1e-6)
    # What does not change is not blown up.
    np.testing.assert_allclose(policy.obs_std, [1.0, *seen.std(0)[1:]], rtol=1e-5)


@pytest.mark.parametrize(
    ("head", "params"),
    [
        (Categorical(3), torch.tensor([0.3, -1.0, 0.5])),
        (Gaussian(np.array([-2.0, 0.0]), np.array([2.0, 1.0])), torch.tensor([0.3, -1.0, 0.2, -0.5])),
    ],
    ids=["categorical", "gaussian"],
)
def test_samples_have_the_density_and_entropy_they_are_given(head, params):
    many = params.expand(100_000, -1)
    actions = head.sample(many, torch.Generator().manual_seed(0))
    logprobs = head.log_prob(many, actions)
    assert -logprobs.mean() == pytest.approx(head.entropy(params).item(), abs=0.02)
    assert head.log_prob(many, head.mode(many)).mean() >= logprobs.max()
    if isinstance(head, Categorical):
        shares = torch.bincount(actions, minlength=3) / len(actions)
        torch.testing.assert_close(shares, params.softmax(-1), rtol=0, atol=0.01)
    else:
        torch.testing.assert_close(actions.mean(0), params[:2], rtol=0, atol=0.02)


def test_continuous_actions_are_scaled_and_clipped_on_their_way_only():
    head = head_for(spaces(EnvironmentConfig(id="Pendulum-v1"))[1])
    assert head.to_env(np.array([[0.5], [9.0], [-9.0]])).tolist() == [[1.0], [2.0], [-2.0]]
    unbounded = Gaussian(np.array([-np.inf]), np.array([np.inf]))
    assert unbounded.to_env(np.array([[7.5]])).tolist() == [[7.5]]


def test_other_action_spaces_are_named():
    import gymnasium

    with pytest.raises(ConfigError, match="MultiDiscrete"):
        head_for(gymnasium.spaces.MultiDiscrete([2, 3]))
