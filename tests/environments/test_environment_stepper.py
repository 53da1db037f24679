"""What workers record is what happened, and all that the trainer needs to compute the same again."""

import numpy as np
import pytest
import torch
from environment_factory import COUNTING, make_stepper

from forebay.environments.ppo import StepBatch
from forebay.fragments import FragmentStore


def stack(tmp_path, fragments):
    store = FragmentStore(path=tmp_path / "store", max_bytes=1 << 24)
    return store.stack(store.add_fragments(fragments))


@pytest.mark.parametrize("truncates", [False, True])
def test_the_last_observation_of_an_episode_is_in_the_stream(truncates):
    stepper, _ = make_stepper(COUNTING, num_envs=1, length=6, arguments={"truncates": truncates})
    fragments = [stepper.make_fragment(), stepper.make_fragment()]

    def column(name):
        return np.concatenate([getattr(f, name) for f in fragments]).ravel().tolist()

    def extra(name):
        return np.concatenate([f.extras[name] for f in fragments]).ravel().tolist()

    assert column("obs") == [0, 1, 2, 3] * 3
    assert column("reward") == [1, 1, 1, 0] * 3
    assert column("first") == [True, False, False, False] * 3
    assert column("next_done") == [False, False, True, False] * 3
    assert extra("live") == [True, True, True, False] * 3
    assert extra("terminated") == [False, False, not truncates, False] * 3
    assert fragments[0].next_obs.item() == 2
    assert [episode.reward for episode in stepper.take_episodes()] == [3.0, 3.0, 3.0]
    assert stepper.take_episodes() == []


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
@pytest.mark.parametrize("memory", ["none", "gru", "lstm"])
def test_the_trainer_computes_the_log_probs_of_the_worker_again(tmp_path, env_id, memory):
    stepper, policy = make_stepper(env_id, memory=memory, length=40)
    stepper.make_fragment()  # so that the state before the first stored step is not the initial one
    fragments = [stepper.make_fragment() for _ in range(4)]
    batch = StepBatch.from_fragments(stack(tmp_path, fragments), fragments_per_chunk=2)
    assert batch.reward_SB.shape == (80, 6)
    assert any(part.abs().max() > 0 for part in batch.state) == (memory != "none")
    with torch.no_grad():
        features, _ = policy.features(batch.obs_SBD, batch.first_SB, batch.state)
        logprobs = policy.head.log_prob(policy.params(features[:-1]), batch.action_SB)
    torch.testing.assert_close(logprobs, batch.logprobs_SB, rtol=0, atol=2e-6)


@pytest.mark.parametrize("memory", ["none", "gru"])
@pytest.mark.parametrize("cut", [(2, 12), (3, 8), (6, 4), (24, 1)], ids=str)
def test_how_a_chunk_is_cut_changes_nothing(tmp_path_factory, cut, memory):
    def batch_of(count, length):
        stepper, _ = make_stepper(COUNTING, length=length, memory=memory)
        fragments = [stepper.make_fragment() for _ in range(count)]
        return StepBatch.from_fragments(stack(tmp_path_factory.mktemp("cut"), fragments), count)

    whole, parts = batch_of(1, 24), batch_of(*cut)
    for name in ("obs_SBD", "first_SB", "action_SB", "logprobs_SB"):
        assert torch.equal(getattr(whole, name), getattr(parts, name))
    for name in ("reward_SB", "done_SB", "terminated_SB", "live_SB"):
        np.testing.assert_array_equal(getattr(whole, name), getattr(parts, name))


def test_every_step_says_which_weights_acted(tmp_path):
    stepper, policy = make_stepper(length=4)
    fragments = [stepper.make_fragment()]
    stepper.load(7, policy.weights())
    fragments.append(stepper.make_fragment())
    batch = StepBatch.from_fragments(stack(tmp_path, fragments), fragments_per_chunk=2)
    assert batch.versions_SB[:, 0].tolist() == [0] * 4 + [7] * 4
    assert [f.fid_in_worker for f in fragments] == [0, 1]
