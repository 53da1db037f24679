"""Episodes that are played to be counted."""

import pytest
from environment_factory import COUNTING, make_policy, small_run

from forebay.environments import evaluation
from forebay.environments.evaluation import measure


@pytest.fixture
def counting(tmp_path):
    """A run in the environment that counts, and a policy for it."""

    def make(length):
        config = small_run(tmp_path, eval_episodes=3, environment={"id": COUNTING, "arguments": {"length": length}})
        return config, make_policy(config.environment, memory="gru")

    return make


def test_an_evaluation_takes_one_episode_of_each_environment(counting):
    metrics = measure(*counting(5))
    assert (metrics["eval/return"], metrics["eval/min_return"], metrics["eval/std_return"]) == (5.0, 5.0, 0.0)
    assert (metrics["eval/episodes"], metrics["eval/episode_steps"]) == (3, 5.0)


def test_an_episode_without_an_end_is_counted_up_to_a_bound(counting, monkeypatch):
    monkeypatch.setattr(evaluation, "MAX_STEPS", 20)
    assert measure(*counting(1000))["eval/episode_steps"] == 20.0
