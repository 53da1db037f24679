"""A group on its way to a rollout worker and back: nothing is lost on it, and no group suffers for another's fault."""

import asyncio
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
from test_cluster_parts import carried
from test_supervised_parts import Method

from forebay.cluster.rollout_worker import RolloutWorker
from forebay.cluster.workers import PlacedWorker, RayAgentLoop, Workers
from forebay.types import RolloutState, SampleParams, Status
from forebay.watching.activity import Activities

pytest.importorskip("ray")
LOOP = ("t", False)


def rollout(name, **fields):
    params = SampleParams(max_tokens=9, seed=3)
    return RolloutState([], rollout_id=f"{name}/0", group_id=name, prompt_ids=[5], sample_params=params, **fields)


def carry(value):
    return pickle.loads(pickle.dumps(value))


def worker_with(generate_group):
    """A run's side of a worker in this process whose agent loop does that; what Ray carries is pickled."""
    worker = RolloutWorker()
    worker._controller, worker._loops = "built", {LOOP: SimpleNamespace(generate_group=generate_group)}

    async def call(*arguments):
        try:
            return carry(await worker.generate(*map(carry, arguments)))
        except Exception as error:
            raise carried(error) from error

    placed = PlacedWorker(SimpleNamespace(name="worker 0"))
    placed.begin(SimpleNamespace(generate=Method(lambda *arguments: asyncio.ensure_future(call(*arguments)))), 1)
    placed.watch = lambda: None
    return RayAgentLoop(Workers([placed]), LOOP, Activities())


async def test_what_an_agent_is_given_and_gives_back_is_as_it_was_in_objects_that_may_be_written_to():
    odd = {"pixels": np.zeros((2, 3), np.uint8), "pair": (1, 2), "big": 1 << 70, "nan": float("nan"), "none": None}
    seen = []

    async def generate_group(states, enable_partial_rollout):
        seen.extend(states)
        for state in states:
            # What was made before the pause is there, to go on from.
            state.append([7], logprobs=[-0.5], model_step=4)
            state.status = Status.COMPLETED
        return [*states, rollout("a", status=Status.COMPLETED, extra_fields={"trajectory_of": "a/0"})]

    given = rollout("a", extra_fields=dict(odd), status=Status.ABORTED, num_tries=2)
    given.append([8, 9], logprobs=[float("nan"), -0.25], mask=0, model_step=[3, -1])
    made, further = await worker_with(generate_group).generate_group([given], enable_partial_rollout=True)
    assert len(given.response_ids) == 2
    assert made is not seen[0] is not given
    assert [made.response_ids.tolist(), made.tokens.tolist()] == [[8, 9, 7], [5, 8, 9, 7]]
    assert [made.response_mask.tolist(), made.response_model_steps.tolist()] == [[0, 0, 1], [3, -1, 4]]
    np.testing.assert_equal(made.logprobs, np.array([np.nan, -0.25, -0.5], np.float32))
    assert (made.num_tries, made.sample_params, made.group_id) == (2, given.sample_params, "a")
    np.testing.assert_equal(made.extra_fields, odd)
    assert type(made.extra_fields["pair"]) is tuple
    assert further.extra_fields == {"trajectory_of": "a/0"}
    made.response_ids[0] = 1
    made.extra_fields["pixels"][0, 0] = 1


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("None", "the agent loop must return a list of RolloutState, got None"),
        ("others", "the agent loop returned rollout 'x/0' of group 'x' in place of 'broken/0'"),
        ("raises", "OSError: no such tool"),
    ],
)
async def test_a_fault_of_an_agent_fails_its_own_group_in_words_that_name_it(fault, words):
    door = asyncio.Event()

    async def generate_group(states, enable_partial_rollout):
        if states[0].group_id != "broken":
            await door.wait()
        elif fault == "raises":
            raise OSError("no such tool")
        elif fault == "others":
            states = [rollout("x")]
        for state in states:
            state.status = Status.COMPLETED
        return None if fault == "None" and states[0].group_id == "broken" else states

    loop = worker_with(generate_group)
    sound, broken = [asyncio.create_task(loop.generate_group([rollout(name)])) for name in ("sound", "broken")]
    (failed,) = await broken
    assert failed.status is Status.FAILED
    assert words in failed.error_msg
    door.set()
    assert [state.status for state in await sound] == [Status.COMPLETED]
