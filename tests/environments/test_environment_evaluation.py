"""Episodes that are played to be counted, and to be seen."""

import itertools

import gymnasium
import pytest
from environment_factory import COUNTING, Counting, make_policy, small_run

from forebay.config import ConfigError
from forebay.environments import evaluation
from forebay.environments.evaluation import measure, watch


@pytest.fixture
def counting(tmp_path):
    """A run in the environment that counts, and a policy for it."""

    def make(length):
        config = small_run(
            tmp_path, eval_episodes=3, environment={"id": COUNTING, "arguments": {"length": length}}
        )
        return config, make_policy(config.environment, memory="gru")

    return make


def test_an_evaluation_takes_one_episode_of_each_environment(counting):
    metrics = measure(*counting(5))
    assert (metrics["eval/return"], metrics["eval/min_return"], metrics["eval/std_return"]) == (5.0, 5.0, 0.0)
    assert (metrics["eval/episodes"], metrics["eval/episode_steps"]) == (3, 5.0)


def test_an_episode_without_an_end_is_counted_and_seen_up_to_a_bound(counting, monkeypatch):
    monkeypatch.setattr(evaluation, "MAX_STEPS", 20)
    assert measure(*counting(1000))["eval/episode_steps"] == 20.0
    assert max(watch(*counting(1000))) <= 20


@pytest.mark.parametrize("length", [1, 7, 8, 30, 250])
def test_frames_are_spread_over_the_whole_episode(counting, length):
    frames = watch(*counting(length))
    steps = list(frames)
    assert (steps[0], steps[-1]) == (0, length)
    assert len(steps) == min(evaluation.NUM_FRAMES, length + 1)
    assert all(frame.flat[0] == step for step, frame in frames.items())
    gaps = [after - before for before, after in itertools.pairwise(steps)]
    assert min(gaps) > 0
    assert max(gaps) <= 2 * length / len(gaps) + 1


def test_a_missing_library_for_drawing_is_named(counting, monkeypatch):
    def render(self):
        raise gymnasium.error.DependencyNotInstalled("pygame is not installed")

    monkeypatch.setattr(Counting, "render", render)
    with pytest.raises(ConfigError, match="cannot be drawn: pygame is not installed"):
        watch(*counting(3))


def test_what_does_not_draw_itself_has_no_frames(counting, monkeypatch):
    monkeypatch.setattr(Counting, "metadata", {"render_modes": []})
    assert watch(*counting(3)) == {}
