"""Workers as Ray actors do what processes do, and come back when they are killed."""

import pytest
from environment_factory import small_run

from forebay.environments.run import launch
from forebay.metrics import read_jsonl
from ray_cluster import local_cluster

pytestmark = pytest.mark.xdist_group("ray")


@pytest.fixture(scope="session")
def ray():
    with local_cluster() as ray:
        yield ray


async def test_a_run_with_ray_workers_outlives_one(tmp_path, ray, monkeypatch):
    from forebay.cluster.environments import RayWorkers
    from forebay.environments.workers.hub import Hub

    actors = []
    start = RayWorkers._start
    monkeypatch.setattr(RayWorkers, "_start", lambda self: actors.append(start(self)) or actors[-1])
    answer = Hub.answer

    async def answer_and_kill(self, report):
        if report.fid_in_worker == 1 and len(actors) == 1:
            ray.kill(actors[0])
        return await answer(self, report)

    monkeypatch.setattr(Hub, "answer", answer_and_kill)
    config = small_run(tmp_path, steps=4, environment={"mode": "ray"}, eval_episodes=1)
    await launch(config)
    last = read_jsonl(config.folder / "metrics.jsonl")[-1]
    assert last["train_step"] == 4
    assert last["worker_restarts"] == 1
