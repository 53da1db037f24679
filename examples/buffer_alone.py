"""The replay buffer with a framework of your own: two processes, one SQLite file, a trainer in plain torch.

    python examples/buffer_alone.py

A policy over ten actions learns which one pays (REINFORCE). One process rolls out and puts groups, the other
takes batches and trains. They share nothing but the buffer's file; kill either and start it again, and no
group is lost or trained on twice. No engine, producer or trainer of Forebay is used.
"""

import asyncio
import multiprocessing
import tempfile
from pathlib import Path

import numpy as np
import torch

from forebay.replay import ReplayBuffer, SQLStorage, StalenessReplayPolicy
from forebay.types import RolloutState, Status

STEPS, BATCH_GROUPS, GROUP_SIZE, THRESHOLD = 60, 4, 8, 4


async def roll_out(folder: Path) -> None:
    """Put groups made with the newest weights until the trainer says that it is done."""
    buffer = ReplayBuffer(StalenessReplayPolicy(), SQLStorage(f"sqlite:///{folder / 'buffer.db'}"))
    random, number = np.random.default_rng(0), 0
    while not (folder / "done").exists():
        weights = np.load(folder / "weights.npy", allow_pickle=False)
        model_step, chances = int(weights[0]), np.exp(weights[1:]) / np.exp(weights[1:]).sum()
        group = []
        for member in range(GROUP_SIZE):
            action = int(random.choice(10, p=chances))
            state = RolloutState([], rollout_id=f"{number}/{member}", group_id=number)
            state.append([action], logprobs=[float(np.log(chances[action]))], model_step=model_step)
            state.reward, state.status = {"score": float(action == 7)}, Status.COMPLETED
            group.append(state)
        number += 1
        await buffer.put(group, "bandit", current_train_step=model_step + 1, stale_threshold=THRESHOLD)
        if await buffer.count("bandit", Status.COMPLETED) > 4 * BATCH_GROUPS:
            await asyncio.sleep(0.01)  # far enough ahead
    await buffer.close()


async def train(folder: Path) -> torch.Tensor:
    """Take batches, the most stale first, and follow the policy gradient with importance weights."""
    buffer = ReplayBuffer(StalenessReplayPolicy(), SQLStorage(f"sqlite:///{folder / 'buffer.db'}"))
    logits = torch.zeros(10, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.2)
    for train_step in range(1, STEPS + 1):
        await buffer.refresh_staleness(task_stale_thresholds={"bandit": THRESHOLD}, current_train_step=train_step)
        # Another process fills the file, and a file wakes nobody.
        while not await buffer.is_ready({"bandit": BATCH_GROUPS}):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        groups, _ = await buffer.take_batch({"bandit": BATCH_GROUPS}, train_step=train_step)
        states = [state for group in groups["bandit"] for state in group]
        rewards = torch.tensor([state.reward["score"] for state in states])
        actions = torch.tensor(np.concatenate([state.response_ids for state in states])).long()
        behavior = torch.tensor(np.concatenate([state.logprobs for state in states]))
        logprobs = torch.log_softmax(logits, 0)[actions]
        ratio = torch.exp(logprobs - behavior)
        loss = -(ratio * (rewards - rewards.mean())).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        publish(folder, train_step, logits)
        await buffer.commit(train_step)  # the weights are safe on disk: what made them may be forgotten
        if train_step % 20 == 0:
            print(f"step {train_step}: mean reward {rewards.mean():.2f}")
    (folder / "done").touch()
    await buffer.close()
    return torch.softmax(logits.detach(), 0)


def publish(folder: Path, model_step: int, logits: torch.Tensor) -> None:
    """Hand the weights to the other process: written beside, then renamed."""
    temporary = folder / "weights.tmp.npy"
    np.save(temporary, np.concatenate([[model_step], logits.detach().numpy()]))
    temporary.replace(folder / "weights.npy")


def run_in_process(folder: Path) -> None:
    """The rollout process."""
    asyncio.run(roll_out(folder))


def main() -> None:
    """Start both."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        publish(folder, 0, torch.zeros(10))
        worker = multiprocessing.get_context("spawn").Process(target=run_in_process, args=(folder,))
        worker.start()
        chances = asyncio.run(train(folder))
        worker.join()
    print(f"chance of the action that pays: {chances[7]:.2f}")


if __name__ == "__main__":
    main()
