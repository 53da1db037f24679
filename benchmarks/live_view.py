"""The live view: a picture of it in a real run, and what drawing it costs.

    python benchmarks/live_view.py cost
    python benchmarks/live_view.py picture recipes/demo_separate.toml steps=60 output=/tmp/runs

The first prints the CPU milliseconds of one refresh, counting the buffer included, by groups in the buffer
and rollouts in flight. The second runs a run file and writes the view of its step 20 to
docs/pictures/live.svg.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import sys
import time
from pathlib import Path

from rich.console import Console

from forebay.config import load_config
from forebay.engines import RolloutController, ScriptedEngine
from forebay.produce import AgentLoopManager, SyncProduceStrategyConfig, TaskRunner
from forebay.replay import AsyncReplayBufferConfig
from forebay.runs import RunConfig, build_run
from forebay.runs.folder import new_folder
from forebay.runs.separate import run_separate
from forebay.runs.show.display import RunDisplay
from forebay.runs.show.live import LiveView, panel
from forebay.runs.show.status import RunStatus, StepNow
from forebay.types import RolloutState, Status
from forebay.watching.activity import GENERATE, Activities

PICTURE = Path(__file__).parent.parent / "docs" / "pictures" / "live.svg"
PICTURE_STEP = 20
WIDTH = 100
REFRESHES = 50


class PictureDisplay(RunDisplay):
    """Takes a picture of everything shown so far, with the live view, a moment after one step."""

    def step(self, step: int, total: int, metrics: dict[str, float]) -> None:
        """See `RunDisplay.step`."""
        super().step(step, total, metrics)
        if step == PICTURE_STEP:
            # In the middle of what follows, where all numbers move.
            asyncio.get_running_loop().call_later(0.4, self._take)

    def _take(self) -> None:
        assert self._status is not None
        taking = asyncio.ensure_future(self._status.count_buffer())
        taking.add_done_callback(lambda _: self._print_and_save())

    def _print_and_save(self) -> None:
        self._console.print(self._panel())
        self._console.save_svg(str(PICTURE), title="forebay train", clear=False)


async def take_picture(config: RunConfig) -> None:
    """Run `config`, a separate run, and write the picture."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=False, highlight=False)
    with PictureDisplay(console) as display:
        display.start(config.name, {"folder": config.folder.name}, total=config.steps)
        with new_folder(config, overwrite=True) as folder:
            run = build_run(config, folder, display)
        await run_separate(run)
    print(PICTURE)


async def measure_cost(num_groups: int, num_in_flight: int) -> float:
    """CPU milliseconds of one refresh."""
    activities, buffer = Activities(), AsyncReplayBufferConfig().build()
    runner = TaskRunner(
        task_name="math", agent_loop=None, produce_strategy=SyncProduceStrategyConfig().build(), sampler=None
    )
    status = RunStatus(
        AgentLoopManager(task_runners=[runner], replay_buffer=buffer),
        activities,
        RolloutController([ScriptedEngine(lambda request: [])]),
        batch_size=64,
    )
    for number in range(num_groups):
        group = [RolloutState([], response_ids=[1], response_model_steps=[number % 5], status=Status.COMPLETED)]
        await buffer.put(group, "math")
    await buffer.refresh_staleness({"math": 1000}, 9)
    step = StepNow(step=1, total=2, done=0.0, eta="1:00", phase="train", phase_s=1.0, facts={"reward": "0.5"})
    console = Console(file=io.StringIO(), force_terminal=True, width=WIDTH)
    with contextlib.ExitStack() as spans:
        for number in range(num_in_flight):
            spans.enter_context(activities.span(GENERATE, f"math/0/{number}"))
        live = LiveView(console, lambda: panel(step, status.now(), width=WIDTH), look=status.count_buffer)
        started_s = time.thread_time()
        for _ in range(REFRESHES):
            await status.count_buffer()
            live.draw()
        cost_ms = (time.thread_time() - started_s) / REFRESHES * 1e3
        live.close()
    return cost_ms


def main() -> None:
    """See the module."""
    if sys.argv[1:2] == ["picture"]:
        asyncio.run(take_picture(load_config(RunConfig, Path(sys.argv[2]), sys.argv[3:])))
    elif sys.argv[1:] == ["cost"]:
        for num_groups, num_in_flight in ((0, 0), (1000, 100), (100_000, 100), (100_000, 10_000)):
            cost_ms = asyncio.run(measure_cost(num_groups, num_in_flight))
            print(f"{num_groups:>7,} groups, {num_in_flight:>6,} rollouts in flight: {cost_ms:.2f} ms a refresh")
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
