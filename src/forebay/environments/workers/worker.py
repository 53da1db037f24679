"""A worker: acts, stores what happened, reports it, and goes on with the newest weights.

::

    consumes: weights, by version          waits for: the hub's answer
    woken by: that answer                  produces: fragments in the store, one report each

The same function in a thread, a process or a Ray actor; it ends when the hub says so, or is gone.
"""

from __future__ import annotations

import torch

from forebay.environments.actions import head_for
from forebay.environments.config import PolicyConfig
from forebay.environments.policy import Policy
from forebay.environments.workers.messages import Link, Report, WorkerSpec
from forebay.environments.workers.stepper import Stepper
from forebay.environments.workers.vector import make_vector
from forebay.fragments import FragmentStore


def work(spec: WorkerSpec, link: Link) -> None:
    """Work until told to stop.

    Raises:
        ConfigError: the environment cannot be made.
        EOFError: the trainer is gone.
    """
    store = FragmentStore(**spec.database_config)
    envs = make_vector(spec.environment, spec.environment.num_envs)
    try:
        obs_size = envs.single_observation_space.shape[0]
        policy = Policy(
            obs_size, head_for(envs.single_action_space), PolicyConfig.model_validate(spec.policy)
        )
        stepper = Stepper(envs, policy, length=spec.length, worker_uuid=spec.worker_uuid, seed=spec.seed)
        orders = link.report(Report(spec.worker_uuid, stepper.version))
        while not orders.stop:
            if orders.weights:
                stepper.load(orders.version, orders.weights)
            orders = link.report(_fragment_report(stepper, store))
    finally:
        envs.close()


def _fragment_report(stepper: Stepper, store: FragmentStore) -> Report:
    fragment = stepper.make_fragment()
    return Report(
        fragment.worker_uuid,
        stepper.version,
        store.add_fragment(fragment),
        fragment.fid_in_worker,
        int(fragment.model_versions.min()),
        int(fragment.extras["live"].sum()),
        [(episode.reward, episode.num_steps) for episode in stepper.take_episodes()],
    )


def work_alone(spec: WorkerSpec, link: Link) -> None:
    """`work` in a process of its own, which is over quietly when the trainer is gone."""
    torch.set_num_threads(1)
    try:
        work(spec, link)
    except EOFError:
        return
