"""The live view: what it says at every width, how often it is drawn, and how it ends."""

from __future__ import annotations

import asyncio
import io
import logging
import time
from collections.abc import Awaitable, Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from forebay.aio.virtual_time import run
from forebay.runs.show.live import MAX_TASKS, PERIOD_S, LiveView, panel
from forebay.runs.show.status import MAX_AGE, Doing, Now, StepNow, TaskNow
from forebay.types import Status


def step_now(**changes: object) -> StepNow:
    fields: dict[str, object] = {
        "step": 12,
        "total": 450,
        "done": 0.0,
        "eta": "3:20",
        "phase": "wait",
        "phase_s": 1.25,
        "facts": {"reward": "0.634 (mean of 20: 0.612)", "eval": "0.543", "tokens/s": "9.3k"},
    }
    return StepNow(**fields | changes)  # type: ignore[arg-type]


TASK = TaskNow(
    batch=16,
    in_flight=24,
    buffer={Status.COMPLETED: 9, Status.ABORTED: 3, Status.EXPIRED: 0, Status.FAILED: 2},
    ages={0: 6, 1: 2, MAX_AGE: 1},
)


def now(**changes: object) -> Now:
    fields: dict[str, object] = {
        "tasks": {"sorting": TASK},
        "stages": {"generate": 380, "judge": 1},
        "stages_of": {},
        "oldest": [Doing(stage="generate", name="sorting/0/0/183/4", age_s=75.0, note="412 tokens")],
        "doing": [],
        "busy": {"producer": 0.98, "trainer": 0.634},
        "model_step": 11,
        "stall": "",
    }
    return Now(**fields | changes)  # type: ignore[arg-type]


def lines(what: Now | None, width: int = 100, **step: object) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False)
    console.print(panel(step_now(**step), what, width=width, ascii_only=True))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_the_panel_says_what_goes_on() -> None:
    assert lines(now()) == [
        "  step 12/450  #-----------------------------  ETA 3:20",
        "  last step  reward 0.634 (mean of 20: 0.612)  eval 0.543  tokens/s 9.3k",
        "  trainer    busy  63%  wait for 1.2 s",
        "  producer   busy  98%  weights of step 11  generating 380 rollouts  judging 1 group",
        "  oldest     generating for 1:15  rollout sorting/0/0/183/4  412 tokens",
        "  groups         ready  in flight  aborted  expired  ready by staleness",
        "  sorting         9/16         24        3        0  0: 6  1: 2  32+: 1  2 failed",
    ]


def test_while_a_run_is_built_there_is_one_line() -> None:
    assert lines(None, phase="warm-up", step=0) == ["  step 0/450  ------------------------------  ETA 3:20  warm-up"]


def test_what_is_not_there_does_not_change_the_height() -> None:
    idle = now(stages={}, oldest=[], tasks={"sorting": TaskNow(batch=16)})
    assert len(lines(idle)) == len(lines(now()))
    assert lines(idle)[3].endswith("nothing in flight")


def test_a_stall_is_the_last_line_and_red() -> None:
    stalled = now(stall="no progress for 61 s; rollout a generating")
    assert lines(stalled)[-1] == "  no progress for 61 s; rollout a generating"
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system="standard")
    console.print(panel(step_now(), stalled, width=100))
    assert isinstance(console.file, io.StringIO)
    assert "\x1b[1;31m" in console.file.getvalue().splitlines()[-1]


def test_every_task_has_a_line_up_to_a_number() -> None:
    tasks = {f"task {number}": TASK for number in range(MAX_TASKS + 3)}
    shown = lines(now(tasks=tasks, stall="stalled"))
    assert sum("9/16" in line for line in shown) == MAX_TASKS
    assert "and 3 more tasks" in shown[-2]


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_a_narrower_terminal_gets_fewer_whole_fields(width: int) -> None:
    shown, whole = lines(now(), width), lines(now(), 200)
    assert len(shown) == len(whole)
    for short, full in zip(shown[1:], whole[1:], strict=True):
        short = short.rstrip("\u2026").rstrip()
        assert full.startswith(short)
        assert full[len(short) : len(short) + 1] in ("", " ")
    assert "busy  63%" in shown[2]
    assert "generating for 1:15" in shown[4]


@given(
    text=st.text(max_size=60),
    width=st.integers(20, 200),
    counts=st.lists(st.integers(0, 10**7), min_size=4, max_size=4),
)
def test_any_name_is_shown_as_text_within_the_width(text: str, width: int, counts: list[int]) -> None:
    task = TaskNow(
        batch=counts[0],
        in_flight=counts[1],
        buffer=dict(zip((Status.COMPLETED, Status.EXPIRED), counts[2:], strict=True)),
        ages=dict(enumerate(counts)),
    )
    odd = now(
        tasks={text: task, "other": TASK}, stall=text, oldest=[Doing(stage="put", name=text, age_s=1e6, note=text)]
    )
    shown = lines(odd, width, phase=text, step=10**9, total=10**9)
    assert len(shown) in (8, 9), "a line was broken"
    assert all(cell_len(line) <= width for line in shown)
    assert all(character.isprintable() for line in shown for character in line)


def terminal() -> Console:
    return Console(file=io.StringIO(), width=80, force_terminal=True)


class Drawings:
    """When a view is drawn, on virtual time, while `during` runs."""

    def __init__(self, during: Callable[[LiveView], Awaitable[None]], *, cost_s: float = 0.0) -> None:
        self._times_s: list[float] = []
        self._cost_s = cost_s
        self._cpu_s = 0.0
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(time, "thread_time", lambda: self._cpu_s)
            run(self._watch(during))

    async def _watch(self, during: Callable[[LiveView], Awaitable[None]]) -> None:
        view = LiveView(terminal(), self._render)
        await during(view)
        # Closing draws once more.
        self.times_s = sorted(set(self._times_s))
        self.gaps_s = [after - before for before, after in pairwise(self.times_s)]
        view.close()

    def _render(self) -> Text:
        self._times_s.append(asyncio.get_running_loop().time())
        self._cpu_s += self._cost_s
        return Text("now")


def test_it_is_drawn_twice_a_second() -> None:
    drawings = Drawings(lambda view: asyncio.sleep(10.2))
    assert drawings.times_s == pytest.approx([PERIOD_S * tick for tick in range(21)])


def test_an_expensive_drawing_puts_off_the_next_one() -> None:
    drawings = Drawings(lambda view: asyncio.sleep(10.2), cost_s=0.02)
    # 0.02 s of CPU at a hundredth of a core; the first two are drawn at the start.
    assert min(drawings.gaps_s) >= 2.0 - 1e-6
    assert len(drawings.times_s) in (5, 6)


def test_what_goes_wrong_in_the_view_ends_the_view_only(caplog: pytest.LogCaptureFixture) -> None:
    console = terminal()

    async def broken() -> None:
        raise OSError("the store is gone")

    async def main() -> None:
        view = LiveView(console, lambda: Text("now"))
        view.look = broken
        await asyncio.sleep(10)
        view.close()

    with caplog.at_level(logging.WARNING):
        run(main())
    assert caplog.text.count("the live view has ended: OSError('the store is gone')") == 1
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_a_view_that_is_closed_while_it_looks_leaves_nothing_behind() -> None:
    async def main() -> set[str]:
        view = LiveView(terminal(), lambda: Text("now"))
        view.look = asyncio.Event().wait  # type: ignore[assignment]
        await asyncio.sleep(1)
        names = {task.get_name() for task in asyncio.all_tasks()}
        view.close()
        await asyncio.sleep(0)
        assert names >= {"live view"}
        return {task.get_name() for task in asyncio.all_tasks()}

    assert "live view" not in run(main())
