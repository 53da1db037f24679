"""A worker: acts, stores what happened, reports it, and goes on with the newest weights.

::

    consumes: weights, by version          waits for: the hub's answer, or signs of life of the hub
    woken by: that answer                  produces: fragments in the store, one report each; signs of life

The same function in a thread or a process; it ends when the hub says so, or is gone.
"""

import asyncio
import sys
from contextlib import closing, suppress
from pathlib import Path

import msgspec
import torch

from forebay.environments.policy import Policy, head_for
from forebay.environments.workers.messages import Orders, Report, WorkerSpec
from forebay.environments.workers.stepper import Stepper, make_vector
from forebay.fragments import FragmentStore
from forebay.io import messages
from forebay.io.address import Address, dial
from forebay.io.channel import BlockingChannel


class HubLink:
    """A worker's connection to the hub's Unix socket, without an event loop."""

    def __init__(self, address: str, worker_uuid: str, *, limit_s: float = messages.SILENCE_LIMIT_S) -> None:
        """A hub that is silent for `limit_s` is gone."""
        self._limit_s = limit_s
        sock = asyncio.run(dial(Address(Path(address))))
        # Weights may be of any size.
        self._channel = BlockingChannel(sock, limit_s=limit_s, max_frame_bytes=sys.maxsize)
        self._channel.send(messages.Note(messages.encode_value(worker_uuid)))
        # A thread beats, also while an environment hangs, for which the hub has a limit.
        self._channel.beat(messages.Alive(), limit_s / messages.BEATS)

    def report(self, report: Report) -> Orders:
        """Send the report and wait for the answer, however long the buffer keeps writers waiting.

        Raises:
            EOFError: the trainer is gone.
        """
        try:
            self._channel.send(messages.Call(0, "report", messages.encode_value(report)))
            while isinstance((received := self._channel.receive())[0], messages.Alive):
                pass
        except TimeoutError:
            raise EOFError(f"the trainer is gone: it has been silent for {self._limit_s:g} s") from None
        except (ConnectionError, EOFError) as error:
            raise EOFError(f"the trainer is gone: {error}") from error
        message, weights = received
        if isinstance(message, messages.Failure):
            raise messages.error_of(message)
        assert isinstance(message, messages.Answer)
        stop, version = msgspec.msgpack.decode(message.value, type=tuple[bool, int])
        return Orders(stop, version, weights[0].tobytes() if weights else b"")

    def close(self) -> None:
        """End the connection."""
        self._channel.close()


def run_worker(address: str, encoded_spec: str) -> None:
    """The whole life of a worker, which ends quietly when the trainer is gone.

    Raises:
        ConfigError: the environment cannot be made.
    """
    spec = WorkerSpec.model_validate_json(encoded_spec)
    # With more threads, small matrix products wait for each other.
    torch.set_num_threads(1)
    with suppress(EOFError), closing(HubLink(address, spec.worker_uuid, limit_s=spec.limit_s)) as link:
        _work(spec, link)


def _work(spec: WorkerSpec, link: HubLink) -> None:
    store = FragmentStore(**spec.database_config)
    envs = make_vector(spec.environment, spec.environment.num_envs)
    try:
        obs_size = envs.single_observation_space.shape[0]
        policy = Policy(obs_size, head_for(envs.single_action_space), spec.policy)
        stepper = Stepper(envs, policy, length=spec.length, worker_uuid=spec.worker_uuid, seed=spec.seed)
        orders = link.report(Report(spec.worker_uuid, stepper.version))
        while not orders.stop:
            if orders.weights:
                stepper.load(orders.version, orders.weights)
            fragment = stepper.make_fragment()
            report = Report(
                spec.worker_uuid,
                stepper.version,
                store.add_fragment(fragment),
                fragment.fid_in_worker,
                int(fragment.model_versions.min()),
                int(fragment.extras["live"].sum()),
                stepper.take_episodes(),
            )
            orders = link.report(report)
    finally:
        envs.close()


if __name__ == "__main__":
    run_worker(*sys.argv[1:])
