"""Environment workers as Ray actors.

::

    run --> actor on this machine: `work_alone` --Unix socket--> hub        as in a process of its own
     '-- waits for its end; Ray tells of its death

Payloads go through files of one machine (`FragmentStore`), so the actors are bound to the trainer's node. Ray
starts and watches them, and counts the CPU each of them uses if it was asked to.
"""

from __future__ import annotations

from typing import Any

from forebay.cluster.fragments import _import_ray
from forebay.environments.messages import Answering, WorkerDied, WorkerSpec


class _Actor:
    def work(self, address: str, spec: str) -> None:
        from forebay.environments.sockets import SocketLink
        from forebay.environments.worker import work_alone

        with SocketLink(address) as link:
            work_alone(WorkerSpec.model_validate_json(spec), link)


class RayWorkers:
    """See `WorkerMode`; connects to the Ray of this machine, or starts one that ends with the program.

    >>> await RayWorkers().run(spec, hub)
    """

    def __init__(self, *, num_cpus: float = 0) -> None:
        """Ray reserves `num_cpus` for each; more than there are would wait for ever, so none by default."""
        self._ray: Any = _import_ray()
        self._num_cpus = num_cpus
        if not self._ray.is_initialized():
            self._ray.init(include_dashboard=False, log_to_driver=False)

    async def run(self, spec: WorkerSpec, hub: Answering) -> None:
        """See `WorkerMode`."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = NodeAffinitySchedulingStrategy(self._ray.get_runtime_context().get_node_id(), soft=False)
        actor = (
            self._ray.remote(_Actor)
            .options(num_cpus=self._num_cpus, max_restarts=0, scheduling_strategy=here)
            .remote()
        )
        try:
            await actor.work.remote(hub.address, spec.model_dump_json())
        except self._ray.exceptions.RayError as error:
            raise WorkerDied(str(error).strip().splitlines()[-1]) from error
        finally:
            self._ray.kill(actor)
