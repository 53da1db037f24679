"""Environment workers as Ray actors.

::

    run --> actor on this machine: `run_worker` --Unix socket--> hub        as in a process of its own
     '-- waits for its end; Ray tells of its death

Payloads go through files of one machine (`FragmentStore`), so the actors are bound to the trainer's node. Ray
starts and watches them.
"""

from __future__ import annotations

from typing import Any

from forebay.cluster.library import Given, connect, import_ray, on_this_node, why
from forebay.environments.workers.hub import Hub
from forebay.environments.workers.messages import WorkerDied, WorkerSpec


class _Actor:
    def work(self, address: str, encoded: str) -> None:
        from forebay.environments.workers.worker import run_worker

        run_worker(address, encoded)


class RayWorkers:
    """Joins the Ray of ``RAY_ADDRESS``, or starts one that ends with the program."""

    def __init__(self) -> None:
        """Raises ConfigError if Ray is not installed, or cannot be joined."""
        connect(Given.find(None), num_cpus=1)
        self._ray = import_ray()

    async def run(self, spec: WorkerSpec, hub: Hub) -> None:
        """Run one worker in an actor of its own; see `WorkerMode.run`."""
        actor = self._start()
        try:
            await actor.work.remote(hub.address, spec.model_dump_json())
        except self._ray.exceptions.RayError as error:
            raise WorkerDied(why(error)) from error
        finally:
            self._ray.kill(actor)

    def _start(self) -> Any:
        # No CPU is reserved: how many workers there are is the recipe's to say, and none must wait for ever.
        options = {"num_cpus": 0, "max_restarts": 0, "scheduling_strategy": on_this_node(self._ray)}
        return self._ray.remote(_Actor).options(**options).remote()
