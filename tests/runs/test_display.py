"""What a person sees: readable in a pipe, calm in a terminal, safe whatever a model writes."""

from __future__ import annotations

import asyncio
import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from forebay.aio.virtual_time import run
from forebay.runs.show.display import MAX_STEP_LINES, WIDTH, RunDisplay
from forebay.types import RolloutState, Status


def piped() -> Console:
    """A console that is not a terminal."""
    return Console(file=io.StringIO(), width=WIDTH, force_terminal=False)


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def rollout(response: str, score: float | None = 1.0, *, prompt: object = "1+1=", **fields: object) -> RolloutState:
    reward = None if score is None else {"score": score}
    return RolloutState(
        [{"role": "system", "content": "Add."}, {"role": "user", "content": prompt}],
        response=response,
        reward=reward,
        response_ids=range(len(response.split())),
        **fields,  # type: ignore[arg-type]
    )


def metrics(step: int, **more: float) -> dict[str, float]:
    return {
        "reward": step / 10,
        "tokens_per_s": 12_340.0,
        "response_tokens": 14.2,
        "step_s": 2.0,
        "time/generate_s": 1.1,
        "time/judge_s": 0.04,
        "time/train_s": 0.8,
        "time/sync_s": 0.06,
    } | more


def history(steps: int) -> list[dict[str, float | None]]:
    return [{"train_step": step, "samples": 8, **metrics(step)} for step in range(1, steps + 1)]


EVALUATIONS: list[dict[str, float | None]] = [
    {"train_step": 0, "eval/score": 0.125, "eval/length": 12.0, "eval/rollouts": 64, "eval/failed": 0.0},
    {"train_step": 8, "eval/score": 0.875, "eval/length": 15.5, "eval/rollouts": 64, "eval/failed": 0.0},
]


def test_a_step_line_holds_the_numbers_and_the_time_split_under_their_names() -> None:
    console = piped()
    display = RunDisplay(console)
    display.evaluation("before", {"eval/score": 0.125})
    display.step(3, 10, metrics(3))
    _, header, line = shown(console).splitlines()
    names, values = header.split(maxsplit=7), line.split(maxsplit=7)
    assert dict(zip(names, values, strict=True)) == {
        "step": "3/10",
        "reward": "0.300",
        "eval": "0.125",
        "tokens/s": "12.3k",
        "length": "14.2",
        "s/step": "2.0",
        "ETA": "0:14",
        "% of time": "generate 55  train 40  sync 3  judge 2",
    }
    # Right-aligned columns: every name ends where its value ends.
    ends = [header.index(f" {name}") + len(name) for name in names[:-1]]
    assert [line.index(f" {value}") + len(value) for value in values[:-1]] == ends


def test_the_time_split_is_that_of_all_steps_of_the_line_and_stays_in_the_width() -> None:
    console = piped()
    display = RunDisplay(console)
    many = {f"time/a_rather_long_phase_{index}_s": 1.0 for index in range(9)}
    display.step(1, 100, {"time/generate_s": 30.0, "time/train_s": 10.0})
    display.step(2, 100, {"time/generate_s": 30.0, "time/evaluate_s": 29.7, "time/sync_s": 0.3})
    display.step(4, 100, many)
    _, first, second = shown(console).splitlines()
    assert first.endswith("generate 60  evaluate 30  train 10")
    assert second.endswith("a_rather_long_phase_0 11"), "one fits"
    assert len(second) <= WIDTH


def test_what_is_not_known_is_a_dash() -> None:
    console = piped()
    RunDisplay(console).step(1, 2, {"reward": float("nan")})
    assert shown(console).splitlines()[1].split() == ["1/2", *"------"]


def test_a_short_run_gets_a_line_for_each_step_and_one_header() -> None:
    console = piped()
    display = RunDisplay(console)
    for step in range(1, 11):
        display.step(step, 10, metrics(step))
    lines = shown(console).splitlines()
    assert [line.split()[0] for line in lines] == ["step"] + [f"{step}/10" for step in range(1, 11)]


def test_a_long_run_gets_few_lines_that_are_means_and_always_the_last_one() -> None:
    console = piped()
    display = RunDisplay(console)
    for step in range(1, 1002):
        display.step(step, 1001, {"reward": float(step)})
    rows = [line.split() for line in shown(console).splitlines() if "/1001" in line]
    assert len(rows) <= MAX_STEP_LINES + 1
    assert rows[0][:2] == ["21/1001", "11.0"]  # the mean of steps 1..21
    assert rows[-1][0] == "1001/1001"


def test_the_header_comes_again_after_a_table_and_before_it_scrolls_away() -> None:
    console = piped()
    display = RunDisplay(console)
    for step in range(1, 31):
        display.step(step, 50, metrics(step))
        display.evaluation("now", {"eval/score": 0.5})
        if step == 2:
            display.rollouts([[rollout("2")]])
    lines = [line.split()[0] for line in shown(console).splitlines() if "reward  " in line or "/50" in line]
    headers = [index for index, first in enumerate(lines) if first == "step"]
    assert [lines[index + 1] for index in headers] == ["1/50", "3/50", "23/50"]


def test_the_time_left_follows_the_recent_steps() -> None:
    console = piped()
    display = RunDisplay(console)
    for step in range(1, 41):
        display.step(step, 100, {"step_s": 1.0 if step <= 20 else 61.0})
    assert shown(console).splitlines()[-1].split()[6] == "1h01m"


@pytest.mark.parametrize("score", [1.0, 0.0, None])
def test_rollouts_show_prompt_response_reward_length_and_finish(score: float | None) -> None:
    console = piped()
    display = RunDisplay(console)
    display.rollouts([[rollout("it is 2", score, finish_reason="stop")]])
    text = shown(console)
    assert "1+1=" in text
    assert "Add." not in text
    row = next(line for line in text.splitlines() if "it is 2" in line)
    assert row.split()[-3:] == ["-" if score is None else f"{score:.3f}", "3", "stop"]


def test_rollouts_are_the_best_and_the_worst_of_a_few_groups() -> None:
    console = piped()
    group = [rollout("middling", 0.5), rollout("worst", 0.0), rollout("best", 1.0)]
    RunDisplay(console).rollouts([group] * 9)
    text = shown(console)
    assert (text.count("best"), text.count("worst"), text.count("middling")) == (2, 2, 0)
    assert text.index("best") < text.index("worst")
    assert text.count("1+1=") == 2


def test_a_rollout_without_a_reward_says_what_became_of_it() -> None:
    console = piped()
    RunDisplay(console).rollouts([[rollout("", None, status=Status.FAILED)]])
    assert "failed" in shown(console)


def test_a_long_response_keeps_both_its_ends() -> None:
    console = piped()
    RunDisplay(console).rollouts([[rollout("START " + "and so on " * 500 + "ANSWER")]])
    text = shown(console)
    assert "START" in text
    assert " ... " in text
    assert "ANSWER" in text
    assert len(text.splitlines()) < 15


def test_a_prompt_of_parts_shows_its_text() -> None:
    console = piped()
    parts = [{"type": "image", "image": "..."}, {"type": "text", "text": "what is it?"}]
    RunDisplay(console).rollouts([[rollout("a cat", prompt=parts)]])
    assert "<image> what is it?" in shown(console)


@pytest.mark.parametrize(
    "say",
    [
        lambda display, text: display.rollouts([[rollout(text, prompt=text, finish_reason=text)]]),
        lambda display, text: display.message(text),
        lambda display, text: display.warning(text),
        lambda display, text: display.evaluation(text, {"eval/score": 1.0}),
        lambda display, text: display.start(text, {text: text}),
    ],
    ids=["rollouts", "message", "warning", "evaluation", "start"],
)
@given(text=st.text(max_size=300))
def test_any_text_is_shown_as_text_within_the_width(say: Callable[[RunDisplay, str], None], text: str) -> None:
    console = piped()
    say(RunDisplay(console), text)
    assert all(character.isprintable() for character in shown(console).replace("\n", ""))


@pytest.mark.parametrize("text", ["[red]x[/red]", "[/]", "[1, 2]", r"\[x]", ":smile:", "[link=x]y[/link]"])
def test_markup_in_a_response_neither_vanishes_nor_acts(text: str) -> None:
    console = Console(file=io.StringIO(), width=WIDTH, force_terminal=True, color_system="truecolor")
    display = RunDisplay(console)
    display.rollouts([[rollout(text, prompt=text)]])
    display.message(text)
    display.warning(text)
    assert shown(console).count(text) == 4


def test_control_characters_of_a_model_do_not_reach_the_terminal() -> None:
    console = Console(file=io.StringIO(), width=WIDTH, force_terminal=True, color_system=None)
    RunDisplay(console).rollouts([[rollout("\x1b[2J\x1b]0;title\x07\r\x9b1mgone\u202e")]])
    text = shown(console)
    assert "gone" in text
    assert not set(text) & set("\x1b\x07\r\x9b\u202e")


def test_an_evaluation_has_a_line_for_each_task_and_the_largest_pass_at_k() -> None:
    console = piped()
    values = {"score": 0.5, "accuracy": 0.25, "failed": 0.0, "rollouts": 64.0}
    values |= {"pass@1": 0.25, "pass@2": 0.4, "pass@16": 0.75}
    of_all = {f"eval/{name}": value for name, value in values.items()}
    of_task = {f"eval/sort/{name}": value for name, value in values.items()} | {"eval/sort/failed": 0.125}
    RunDisplay(console).evaluation("step 20", of_all | of_task)
    first, second = shown(console).splitlines()
    assert " ".join(first.split()) == "eval step 20 score 0.500 accuracy 0.250 pass@16 0.750"
    assert " ".join(second.split()) == "eval step 20 sort score 0.500 accuracy 0.250 pass@16 0.750 failed 0.125"


def test_a_pipe_gets_no_live_view() -> None:
    console = piped()
    with RunDisplay(console) as display:
        display.start("demo", {"model": "tiny"}, total=3)
        display.phase("generate")
        display.production(1, 8)
    assert shown(console).splitlines() == ["forebay demo", "  model  tiny"]


def on_terminal(width: int = WIDTH) -> Console:
    return Console(file=io.StringIO(), width=width, force_terminal=True)


def test_a_terminal_gets_a_live_view_and_is_left_as_it_was() -> None:
    console = on_terminal()

    async def main() -> None:
        with RunDisplay(console, clock=asyncio.get_running_loop().time) as display:
            display.start("demo", {}, step=2, total=5)
            display.phase("generate")
            for done in range(1, 9):
                display.production(done, 8)
                await asyncio.sleep(0.04)
            await asyncio.sleep(5)
            display.step(3, 5, metrics(3))
            display.phase("train")
            await asyncio.sleep(5)
        text = shown(console)
        display.close()
        assert shown(console) == text

    run(main())
    text = shown(console)
    assert "step 2/5" in text
    assert "generate 8/8 groups" in text
    assert "generate 4/8 groups" not in text, "drawn more often than a person can see"
    assert "ETA 0:04" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is back
    assert text.rindex("\x1b[2K") > text.rindex("step 3/5")  # and the view is gone


def test_what_blocks_the_event_loop_is_named_before_it_does() -> None:
    console = on_terminal()

    async def main() -> str:
        with RunDisplay(console) as display:
            display.start("demo", {}, total=5)
            display.phase("warm-up")
            return shown(console)

    assert "warm-up" in run(main())


def test_the_live_view_goes_when_the_run_fails() -> None:
    console = on_terminal()

    async def main() -> None:
        with RunDisplay(console) as display:
            display.start("demo", {}, total=5)
            display.step(1 // 0, 5, {})

    with pytest.raises(ZeroDivisionError):
        run(main())
    assert shown(console).rindex("\x1b[?25h") > shown(console).rindex("\x1b[?25l")


def test_a_narrow_terminal_loses_the_time_split_and_nothing_else() -> None:
    console = on_terminal(80)
    display = RunDisplay(console)
    display.step(3, 10, metrics(3))
    _, line = (re.sub("\x1b[^m]*m", "", line) for line in shown(console).splitlines())
    assert line.split()[:4] == ["3/10", "0.300", "-", "12.3k"]
    assert line.endswith("generate 55  train 40")
    assert len(line) <= 80


def test_the_summary_tells_how_it_went_and_where_it_is(tmp_path: Path) -> None:
    console = piped()
    (tmp_path / "model").mkdir()
    (tmp_path / "metrics.jsonl").touch()
    now = iter([0.0, 0.0, 92.0])
    display = RunDisplay(console, clock=lambda: next(now))
    display.summary(history(8), EVALUATIONS, {"stalls": "none warned of"}, tmp_path)
    text = shown(console)
    rows = [line.split() for line in text.splitlines()]
    assert ["score", "0.125", "0.875", "+0.750"] in rows
    assert ["length", "12.0", "15.5", "+3.5"] in rows
    assert ["steps", "8"] in rows
    assert "1:32" in text
    assert [str(tmp_path / "model"), "the", "trained", "model"] in [row[:4] for row in rows]
    assert "metrics.jsonl" in text
    assert ["stalls", "none", "warned", "of"] in rows
    assert "checkpoints" not in text
    assert "reward by train step" in text
    assert "\x1b" not in text
    assert max(len(line) for line in text.splitlines() if str(tmp_path) not in line) <= WIDTH


def test_the_summary_of_a_run_that_did_nothing_is_short(tmp_path: Path) -> None:
    console = piped()
    RunDisplay(console).summary([], [], {}, tmp_path)
    text = shown(console)
    assert "steps  0" in text
    assert "reward by train step" not in text


def test_ctrl_c_says_what_happens_next() -> None:
    console = piped()
    RunDisplay(console).interrupted()
    assert "finished and saved first. Press Ctrl-C again" in shown(console)


_ANY_TERMINAL = """
from forebay.runs.show.display import RunDisplay
display = RunDisplay()
display.message("caf\\u00e9 \\u2192 done")
display.step(1, 1, {"reward": 0.5})
"""


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_standard_output_takes_any_character_in_any_encoding(encoding: str) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "COLUMNS": "40"}
    result = subprocess.run([sys.executable, "-c", _ANY_TERMINAL], env=environment, capture_output=True)
    assert result.returncode == 0, result.stderr.decode()
    message, _, line = result.stdout.decode(encoding).splitlines()
    assert message == {"ascii": "caf? ? done", "utf-8": "caf\u00e9 \u2192 done"}[encoding]
    assert line.split()[:2] == ["1/1", "0.500"]
