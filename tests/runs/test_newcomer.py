"""What people meet who try a run for the first time: a mistake is one sentence, before it costs time."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from forebay.config import ConfigError, parse_config
from forebay.io.safe_files import DiskError
from forebay.runs.config import RunConfig
from forebay.runs.folder import occupied, saved_config
from forebay.runs.launch import launch, try_all
from forebay.runs.show.display import RunDisplay
from forebay.runs.show.surroundings import ended_by_ctrl_c


def score(state):
    return float(state.response == state.reward_model["ground_truth"])


def nothing(state):
    return None


def words(state):
    return "good"


def broken(state):
    return state.nosuch


def config(folder, rows=None, **changes):
    if rows is None:
        rows = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(8)]
    source = folder / "rows.jsonl"
    source.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    judge = changes.pop("judge", f"{__name__}:score")
    tiny = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, **changes.pop("tiny", {})}
    table = {
        "name": "run",
        "steps": 1,
        "batch_size": 2,
        "rollouts_per_prompt": 2,
        "output": str(folder),
        "model": {"source": "tiny", "tiny": tiny, "max_context": 32},
        "tasks": [{"name": "add", "data": {"source": str(source)}, "judge": judge, "sample": {"max_tokens": 3}}],
        "warmup": {"steps": 3, "batch_size": 4},
    }
    return parse_config(RunConfig, {**table, **changes})


def train(folder, *args, **kwargs):
    return asyncio.run(launch(config(folder, *args, **kwargs)))


def test_the_alphabet_of_a_tiny_model_is_that_of_its_data(tmp_path):
    train(tmp_path, [{"prompt": "ä→", "answer": "ß"}] * 2)
    alphabet = saved_config(tmp_path / "run").model.tiny.alphabet
    assert alphabet.endswith("ßä→")
    # The folder says which one it was, so a resumed run has the same.
    asyncio.run(launch(saved_config(tmp_path / "run", ["steps=2"]), resume=tmp_path / "run"))


@pytest.mark.parametrize("row", [{"prompt": "1→", "answer": "2"}, {"prompt": "1=", "answer": "→"}])
def test_a_character_outside_the_alphabet_is_named_with_its_row(tmp_path, row):
    rows = [{"prompt": "1=", "answer": "2"}, row]
    with pytest.raises(ConfigError) as caught:
        train(tmp_path, rows, tiny={"alphabet": "0123456789+="})
    assert f"{tmp_path}/rows.jsonl, line 2: the model has no token for the character '→' (U+2192)" in str(caught.value)
    assert list(tmp_path.iterdir()) == [tmp_path / "rows.jsonl"]


def test_a_seed_that_no_generator_takes_is_refused(tmp_path):
    assert config(tmp_path, seed=2**63 - 1).seed == 2**63 - 1
    with pytest.raises(ConfigError, match="'seed' = 9223372036854775808: Input should be less than"):
        config(tmp_path, seed=2**63)


def test_half_a_surrogate_pair_is_named_with_its_row(tmp_path):
    with pytest.raises(ConfigError, match=r"line 2: the model has no token for the character '\\ud83d'"):
        train(tmp_path, [{"prompt": "1+1=", "answer": "2"}, {"prompt": "\ud83d", "answer": "3"}])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"judge": f"{__name__}:nothing"}, "it returned None; a judge returns a number"),
        ({"judge": f"{__name__}:words"}, "it returned 'good'; a judge returns a number"),
        ({"rows": [{"prompt": "1" * 40, "answer": "2"}]}, r"prompt 0 has 41 tokens, .*rows\.jsonl, line 1"),
        ({"rows": []}, "is empty"),
        ({"rows": [{"question": "1", "answer": "2"}]}, "has no column 'prompt'"),
    ],
)
def test_what_cannot_work_is_found_before_the_warm_up(tmp_path, capsys, changes, said):
    with pytest.raises(ConfigError, match=said):
        train(tmp_path, **changes)
    assert "warm-up" not in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [tmp_path / "rows.jsonl"]


@pytest.mark.parametrize("output", ["a file", "a file/below"])
def test_an_output_that_cannot_be_written_is_one_sentence(tmp_path, output):
    (tmp_path / "a file").write_text("")
    with pytest.raises(DiskError, match=r"the run in .* cannot be written or read"):
        train(tmp_path, output=str(tmp_path / output))


def test_a_finished_run_says_so_and_changes_nothing(tmp_path):
    train(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    line, interrupted = asyncio.run(launch(saved_config(tmp_path / "run"), resume=tmp_path / "run"))
    assert "is finished: all 1 train steps are done; to go on, add steps=N" in line
    assert not interrupted
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_a_run_that_was_killed_before_its_model_was_published_is_not_finished(tmp_path):
    train(tmp_path)
    (tmp_path / "run" / "model" / "model.safetensors").unlink()
    asyncio.run(launch(saved_config(tmp_path / "run"), resume=tmp_path / "run"))
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()


def test_the_end_names_the_next_commands(tmp_path, capsys):
    train(tmp_path)
    out = capsys.readouterr().out
    assert f"forebay train --resume {tmp_path}/run steps=2" in out
    assert str(tmp_path / "run" / "model") in out


def test_ctrl_c_during_the_warm_up_ends_it_at_once(tmp_path, capsys, monkeypatch):
    steps = []

    def press(display, done, total, note):
        steps.append(done)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(RunDisplay, "progress", press)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path)
    assert steps == [1]
    assert "stopped before the first train step (warm-up): nothing of this run is kept" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [tmp_path / "rows.jsonl"]
    assert signal.getsignal(signal.SIGINT) is before


def test_the_warm_up_shows_how_far_it_is(capsys):
    now = iter(range(0, 1000, 4))
    display = RunDisplay(clock=lambda: float(next(now)))
    display.phase("warm-up")
    for step in range(1, 8):
        display.progress(step, 7, "loss 1.000")
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert lines[0].startswith("warm-up 3/7, loss 1.000, about 0:")
    assert len(lines) == 2


def test_a_lock_is_gone_with_its_run_and_does_not_let_two_in(tmp_path):
    folder = tmp_path / "run"
    (tmp_path / "link").symlink_to(folder)
    with occupied(folder):
        # Such as a cell of a notebook that is run twice: a process's own lock lets it in.
        with pytest.raises(ConfigError, match="at work"), occupied(tmp_path / "link"):
            pass
        # The one that was refused has not freed the folder for other processes.
        locked = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'a'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
        other = [sys.executable, "-c", locked, str(tmp_path / ".run.lock")]
        assert b"BlockingIOError" in subprocess.run(other, capture_output=True).stderr
        # Last: whatever of this process closes the file gives the lock back.
        assert (tmp_path / ".run.lock").read_text() == str(os.getpid())
    (tmp_path / "link").unlink()
    assert list(tmp_path.iterdir()) == []
    # One left over by a killed process does no harm.
    (tmp_path / ".run.lock").write_text("1")
    with occupied(folder):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_run_off_the_main_thread_needs_no_signals(tmp_path):
    done = []

    def work():
        with ended_by_ctrl_c():
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [True]


def sometimes(state):
    if state.rollout_id.endswith("0"):
        raise RuntimeError("the service is down")
    return 1.0


def test_check_tries_one_sample_of_everything_and_keeps_nothing(tmp_path):
    said = []
    asyncio.run(try_all(config(tmp_path), said.append))
    assert [line.split()[0] for line in said] == ["folder", "data", "model", "engine", "judge"]
    assert said[1] == "data    add: 8 prompts to train on"
    assert "{'score': 0.0}" in said[-1]
    assert list(tmp_path.iterdir()) == [tmp_path / "rows.jsonl"]


def test_check_tells_of_failures_among_the_rollouts(tmp_path):
    said = []
    asyncio.run(try_all(config(tmp_path, judge=f"{__name__}:sometimes"), said.append))
    assert any("warning 1 of 2 rollouts failed" in line and "the service is down" in line for line in said)
    with pytest.raises(ConfigError, match="it returned None"):
        asyncio.run(try_all(config(tmp_path, judge=f"{__name__}:nothing"), said.append))
    with pytest.raises(ConfigError, match=r"no attribute 'nosuch' \(.*test_newcomer.py, line \d+\)$"):
        asyncio.run(try_all(config(tmp_path, judge=f"{__name__}:broken"), said.append))


def test_arguments_of_the_default_engine_need_no_name(tmp_path):
    changed = config(tmp_path, engine={"arguments": {"max_batch": 4}})
    assert changed.engine.name == "transformers"
