"""The colocated run end to end: a real tiny model, the real engine, the real trainer."""

import asyncio
import importlib.util
import json
import logging
import os
import shutil
import signal
import string
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from forebay.cli.errors import one_message
from forebay.config import ConfigError, load_config, parse_config, read_toml
from forebay.environments.config import FragmentRunConfig
from forebay.ledger import Ledger
from forebay.metrics import read_jsonl
from forebay.models import resolve_model
from forebay.models.tiny import character_tokenizer
from forebay.produce import Prompt
from forebay.runs import steps
from forebay.runs.build import _examples
from forebay.runs.config import RunConfig, to_toml
from forebay.runs.folder import list_checkpoints, new_folder, saved_config
from forebay.runs.launch import launch, launch_evaluation
from forebay.runs.rollouts import TaskData
from forebay.runs.show.display import RunDisplay
from forebay.runs.show.surroundings import logs_shown
from forebay.train import TrainController
from forebay.types import RolloutState, Status

ROOT = Path(__file__).parents[2]


def run_table(output, **changes):
    table = {
        "name": "run",
        "seed": 3,
        "steps": 4,
        "batch_size": 4,
        "rollouts_per_prompt": 4,
        "output": str(output),
        "model": {"source": "tiny", "tiny": {"hidden_size": 32, "num_layers": 2, "num_heads": 2}},
        "tasks": [
            {
                "name": "sorting",
                "data": {"source": "sorting", "arguments": {"length": 3, "letters": 5}, "size": 60},
                "eval_data": {"source": "sorting", "arguments": {"length": 3, "letters": 5}, "start": 60, "size": 20},
                "judge": {"name": "exact_match", "arguments": {"partial_credit": True}},
                "sample": {"max_tokens": 5},
            }
        ],
        "warmup": {"steps": 10, "batch_size": 16},
        "train": {"lr": 1e-3, "token_budget": 512},
    }
    return {**table, **changes}


def config(output, **changes):
    return parse_config(RunConfig, run_table(output, **changes))


def train(output, **changes):
    return asyncio.run(launch(config(output, **changes)))


def losses(folder):
    return {row["train_step"]: row["train/loss"] for row in read_jsonl(folder / "metrics.jsonl") if row["train_step"]}


READS_ALL = {"lr": 1e-3, "token_budget": 512, "entropy_coef": 1e-4}
"""With an entropy bonus passes are made over groups without an advantage too, and are measured."""


def test_a_run_leaves_everything_it_promises(tmp_path, capsys):
    line, interrupted = train(tmp_path, train=READS_ALL)
    folder = tmp_path / "run"
    assert not interrupted
    assert line.startswith("held-out accuracy: ")
    for name in ("run.toml", "metrics.jsonl", "live.json", "history/segment_000/segment.json", "ledger.jsonl"):
        assert (folder / name).stat().st_size > 0, name
    assert (folder / "model" / "model.safetensors").exists()
    assert [path.name for path in list_checkpoints(folder)] == ["step_000004"]
    rows = [row for row in read_jsonl(folder / "metrics.jsonl") if row["train_step"] > 0]
    assert [row["train_step"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        assert row["staleness"] == 0
        assert row["samples"] == 16
        # The engine's logprobs are the trainer's: the same weights, computed in two ways.
        assert abs(row["train/mismatch_kl"]) < 1e-4
    out = capsys.readouterr().out
    assert "saved" in out
    assert "\x1b" not in out


def test_two_runs_are_equal_and_another_seed_is_not(tmp_path):
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        train(tmp_path, name=name, seed=seed)
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert losses(tmp_path / "a") != losses(tmp_path / "c")


def test_the_loop_written_by_hand_reaches_identical_losses(tmp_path):
    spec = importlib.util.spec_from_file_location("low_level_loop", ROOT / "examples/low_level_loop.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    for train_table in (
        {"lr": 1e-3, "token_budget": 512},
        {"lr": 1e-3, "mini_batches": 2, "kl_coef": 0.01},
        {"lr": 1e-3, "advantage": "gae", "critic_lr": 1e-3},
    ):
        train(tmp_path, name="high", train=train_table)
        history = asyncio.run(example.train(config(tmp_path, name="low", train=train_table)))
        expected = losses(tmp_path / "high")
        assert [row["train/loss"] for row in history] == [expected[step] for step in (1, 2, 3, 4)]
        for name in ("high", "low"):
            folder = tmp_path / name
            folder.rename(tmp_path / f"{name}-{len(list(tmp_path.iterdir()))}")


def test_a_resumed_run_reaches_the_same_losses(tmp_path):
    train(tmp_path, name="whole", steps=6)
    train(tmp_path, name="parts", steps=6, checkpoint_every=2, keep_checkpoints=3)
    folder = tmp_path / "parts"
    assert losses(folder) == losses(tmp_path / "whole")
    # As if the run had been killed after step 5: the last complete checkpoint is that of step 4.
    (folder / "checkpoints" / "step_000006").rename(folder / "checkpoints" / "step_000006.tmp")
    resumed = saved_config(folder)
    line, _ = asyncio.run(launch(resumed, resume=folder))
    assert losses(folder) == losses(tmp_path / "whole")
    assert line is not None
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("whole", "parts")]
    assert weights[0] == weights[1]


def test_a_finished_run_can_be_given_more_steps(tmp_path):
    train(tmp_path, steps=2)
    folder = tmp_path / "run"
    asyncio.run(launch(saved_config(folder, ["steps=4"]), resume=folder))
    assert sorted(losses(folder)) == [1, 2, 3, 4]


def test_no_prompt_is_trained_twice_or_lost_across_a_resume(tmp_path):
    train(tmp_path, steps=3, checkpoint_every=1)
    folder = tmp_path / "run"
    asyncio.run(launch(saved_config(folder, ["steps=6"]), resume=folder))
    events = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    trained = [event["group"] for event in events if event["event"] == "trained"]
    assert len(trained) == len(set(trained)) == 6 * 4


def test_eval_of_a_finished_run_gives_its_last_numbers(tmp_path):
    train(tmp_path)
    folder = tmp_path / "run"
    metrics = asyncio.run(launch_evaluation(saved_config(folder), folder / "model"))
    last = [row for row in read_jsonl(folder / "metrics.jsonl") if row.get("eval/score") is not None][-1]
    assert metrics["eval/score"] == last["eval/score"]


def test_several_tasks_share_the_batch_and_are_evaluated_apart(tmp_path):
    first = run_table(tmp_path)["tasks"][0]
    second = {
        "name": "addition",
        "data": {"source": "addition", "arguments": {"digits": 1}, "size": 50},
        "eval_data": {"source": "addition", "arguments": {"digits": 1}, "start": 50, "size": 10},
        "judge": {"name": "exact_match"},
        "sample": {"max_tokens": 4},
        "weight": 3.0,
    }
    train(tmp_path, tasks=[first, second], steps=2)
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert "eval/addition/score" in rows[0]
    assert "produce/sorting/raw_reward" in rows[1]
    assert rows[1]["produce/addition/samples"] == 12


def test_dynamic_sampling_trains_no_group_without_variance(tmp_path):
    train(tmp_path, produce={"filter": "reward_variance"}, warmup={"steps": 40, "batch_size": 16})
    rows = [row for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") if row["train_step"]]
    assert all(row["samples"] == 16 for row in rows)
    assert any(row["produce/samples"] > 16 for row in rows)


def raising_judge(state):
    raise RuntimeError("the judge is broken")


def test_a_judge_that_raises_is_found_before_the_warm_up(tmp_path):
    task = {**run_table(tmp_path)["tasks"][0], "judge": {"name": f"{__name__}:raising_judge"}}
    del task["eval_data"]
    with pytest.raises(ConfigError, match=r"the judge is broken.*tried before the start on sorting, row 0"):
        train(tmp_path, tasks=[task])
    assert not (tmp_path / "run").exists()


def bad_runs():
    task = run_table("out")["tasks"][0]
    no_judge = {key: value for key, value in task.items() if key != "judge"}
    long_prompt = {**task, "sample": {"max_tokens": 512}}
    missing = {**task, "data": {"source": "no/such/file.jsonl"}}
    no_rule = {"mode": "separate", "staleness_rule": "fractions:Fraction"}
    greedy = {**task, "sample": {"max_tokens": 5, "temperature": 0.0}}
    grouped = {"lr": 1e-3, "advantage": "pass_at_5"}
    return [
        ({"tasks": [no_judge]}, "task 'sorting'.*no judge"),
        ({"tasks": [task, {**greedy, "name": "b"}]}, r"tasks\.1\.sample\.temperature is 0"),
        ({"train": grouped}, "rollouts_per_prompt = 4 is too few for train.advantage = 'pass_at_5'"),
        ({"rollouts_per_prompt": 1}, "rollouts_per_prompt = 1 gives advantage 'grpo' nothing"),
        ({"train": {"lr": 1e-3, "mini_batches": 17}}, "mini_batches = 17 is more than the 16 rollouts"),
        ({"train": {"lr": 1e-3, "token_budget": 8}}, "token_budget = 8 is less than"),
        ({"train": {"lr": 1e-3, "lora_rank": 2, "lora_targets": ["nothing"]}}, r"\[train\]"),
        ({"seed": -1}, "'seed' = -1"),
        ({"tasks": [long_prompt]}, "max_tokens"),
        ({"tasks": [missing]}, "no/such/file.jsonl"),
        ({"tasks": [task, task]}, "task names must differ"),
        ({"model": {"source": "no/such/folder"}}, "no/such/folder"),
        ({"produce": {"filter": "variance"}}, "reward_variance"),
        ({"produce": no_rule}, "staleness_rule 'fractions:Fraction' is no StalenessRule; derive its class from that"),
        ({"train": {"lr": 1e-3, "advantage": "gae"}}, "critic"),
        ({"stepps": 3}, "did you mean 'steps'"),
        ({"train": {"learning_rate": 1e-3}}, "unknown key 'train.learning_rate'"),
    ]


@pytest.mark.parametrize(("changes", "message"), bad_runs(), ids=lambda value: str(value)[:40])
def test_bad_input_is_one_clear_error(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        train(tmp_path, **changes)
    assert not (tmp_path / "run").exists(), "a start that failed is in the way of the next"


def test_a_prompt_longer_than_the_context_is_named_or_dropped(tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "cab=", "answer": "abc"}, {"prompt": "x" * 600, "answer": "x"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {**run_table(tmp_path)["tasks"][0], "data": {"source": str(path)}}
    with pytest.raises(ConfigError, match=r"sorting.*prompt 1 has \d+ tokens"):
        train(tmp_path, tasks=[task], warmup=None)
    train(tmp_path, name="dropped", tasks=[{**task, "overlong_prompts": "drop"}], warmup=None, steps=1)


def test_an_empty_dataset_and_a_model_without_tokenizer_are_named(tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    task = {**run_table(tmp_path)["tasks"][0], "data": {"source": str(empty)}}
    with pytest.raises(ConfigError, match="empty"):
        train(tmp_path, tasks=[task])
    train(tmp_path, name="good", steps=1)
    folder = tmp_path / "good" / "model"
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (folder / name).unlink(missing_ok=True)
    with pytest.raises(ConfigError, match="tokenizer"):
        train(tmp_path, name="bare", model={"source": str(folder)})


def test_an_existing_run_is_not_overwritten_unasked(tmp_path):
    train(tmp_path, steps=1)
    with pytest.raises(ConfigError, match="--resume"):
        train(tmp_path, steps=1)
    asyncio.run(launch(config(tmp_path, steps=2), overwrite=True))
    assert sorted(losses(tmp_path / "run")) == [1, 2]
    with pytest.raises(ConfigError, match="no run in"):
        saved_config(tmp_path)


def test_overwriting_puts_the_earlier_run_back_when_the_new_one_cannot_start(tmp_path):
    train(tmp_path, steps=1)
    before = losses(tmp_path / "run")
    too_long = {**run_table(tmp_path)["tasks"][0], "sample": {"max_tokens": 512}}
    with pytest.raises(ConfigError, match="leaves no room"):
        asyncio.run(launch(config(tmp_path, tasks=[too_long]), overwrite=True))
    assert losses(tmp_path / "run") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_a_start_that_was_cut_off_is_not_in_the_way(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    (folder / "warmup").mkdir(parents=True)
    (folder / "run.toml").write_text("")
    (folder / "metrics.jsonl").write_text("")
    with new_folder(config(tmp_path), overwrite=False):
        assert [path.name for path in folder.iterdir()] == ["run.toml"]
    (folder / "metrics.jsonl").write_text('{"train_step": 0}\n')
    with pytest.raises(ConfigError, match="without a checkpoint: replace it"):
        new_folder(config(tmp_path), overwrite=False).__enter__()
    # Killed in its block, one that was to replace this leaves both.
    killed = new_folder(config(tmp_path), overwrite=True)
    killed.__enter__()
    copy = shutil.copytree(tmp_path, tmp_path / "as it was left")
    killed.__exit__(ValueError, ValueError("it failed"), None)
    assert (folder / "metrics.jsonl").exists()
    left = copy / "run"
    with pytest.raises(ConfigError, match="already holds a run without a checkpoint: replace it"):
        new_folder(config(copy), overwrite=False).__enter__()
    assert (left / "metrics.jsonl").exists()
    with new_folder(config(copy), overwrite=True):
        assert not (left / "metrics.jsonl").exists()
    assert sorted(path.name for path in copy.iterdir() if not path.name.startswith(".")) == ["run"]
    # Killed before it had made anything, or once it had a folder, one leaves the run that it put aside.
    (left / "metrics.jsonl").write_text('{"train_step": 0}\n')
    for made in (False, True):
        left.rename(copy / "run.old")
        (copy / "run.old" / ".aside").touch()
        if made:
            left.mkdir()
        with pytest.raises(ConfigError, match="already holds a run without a checkpoint: replace it"):
            new_folder(config(copy), overwrite=False).__enter__()
        assert (left / "metrics.jsonl").exists()
    # One that cannot write its run file gives it back itself.
    with monkeypatch.context() as patch:
        patch.setattr("forebay.runs.folder.write_text", Mock(side_effect=OSError("the disk is full")))
        with pytest.raises(OSError, match="the disk is full"):
            new_folder(config(copy), overwrite=True).__enter__()
    assert (left / "metrics.jsonl").exists()
    with new_folder(config(copy), overwrite=True):
        pass
    # A folder of that name that no start has put there is left alone.
    (copy / "run.old").mkdir()
    with new_folder(config(copy), overwrite=True):
        (left / "metrics.jsonl").write_text('{"train_step": 0}\n')
    with pytest.raises(ConfigError, match="is in the way"):
        new_folder(config(copy), overwrite=True).__enter__()


def test_the_context_of_a_model_in_a_folder_is_the_run_files(tmp_path):
    source = str(resolve_model(config(tmp_path).model, seed=3))
    with pytest.raises(ConfigError, match=r"raise model\.max_context"):
        train(tmp_path, model={"source": source, "max_context": 5}, warmup=None)
    with pytest.raises(ConfigError, match=r"model\.max_context = 4096"):
        train(tmp_path, model={"source": source, "max_context": 4096}, warmup=None)
    train(tmp_path, model={"source": source, "max_context": 16}, warmup=None, steps=1)


def failing_after(monkeypatch, step, error):
    fit = TrainController.fit

    def fit_or_fail(self, groups, **settings):
        if self.train_step == step:
            raise error
        return fit(self, groups, **settings)

    monkeypatch.setattr(TrainController, "fit", fit_or_fail)


def test_a_diverged_run_is_saved_and_its_batch_is_trained_after_the_resume(tmp_path, monkeypatch, capsys):
    train(tmp_path, name="whole", steps=4)
    failing_after(monkeypatch, 2, FloatingPointError("the gradient norm is nan"))
    with pytest.raises(FloatingPointError, match="train step 3"):
        train(tmp_path, steps=4)
    assert "saved in" in capsys.readouterr().out
    monkeypatch.undo()
    folder = tmp_path / "run"
    assert [path.name for path in list_checkpoints(folder)] == ["step_000002"]
    asyncio.run(launch(saved_config(folder), resume=folder))
    assert losses(folder) == losses(tmp_path / "whole")
    assert Ledger.read(folder / "ledger.jsonl").balance({"sorting": 0}).trained == 4 * 4


def test_a_batch_that_the_trainer_refuses_is_one_message(tmp_path, monkeypatch):
    failing_after(monkeypatch, 0, ValueError("no such thing"))
    with pytest.raises(ConfigError, match="the trainer, in train step 1: no such thing"):
        train(tmp_path)


def test_memory_that_does_not_suffice_for_a_step_is_one_message(tmp_path, monkeypatch, capsys):
    failing_after(monkeypatch, 1, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    with pytest.raises(SystemExit), one_message():
        train(tmp_path)
    said = " ".join(capsys.readouterr().err.split())
    assert "Tried to allocate 2.00 GiB. A smaller train.token_budget" in said
    assert len(list_checkpoints(tmp_path / "run")) <= 1


def advantage_that_finds_nothing(batch, config):
    return next(row for row in batch.metrics if row == "nothing")


def test_a_stop_iteration_of_the_users_code_ends_the_run_with_its_place(tmp_path, capsys):
    settings = {"lr": 1e-3, "token_budget": 512, "advantage": f"{__name__}:advantage_that_finds_nothing"}
    with pytest.raises(SystemExit), one_message():
        train(tmp_path, steps=1, warmup=None, train=settings)
    said = " ".join(capsys.readouterr().err.split())
    assert "the function raised StopIteration" in said
    assert f"{Path(__file__).name}, line" in said


def test_overrides_of_a_resumed_run_stay_and_cannot_move_it(tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("forebay.runs.checkpoints.device_fact", lambda _: "cuda (NVIDIA L4), bfloat16")
        train(tmp_path, steps=1)
    folder = tmp_path / "run"
    for override in ("name=other", "output=elsewhere"):
        with pytest.raises(ConfigError, match="stays in"):
            saved_config(folder, [override])
    capsys.readouterr()
    asyncio.run(launch(saved_config(folder, ["steps=2"]), resume=folder))
    assert saved_config(folder).steps == 2
    said = " ".join(capsys.readouterr().out.split())
    assert "changed: device is cpu, float32, sdpa attention, was cuda (NVIDIA L4), bfloat16" in said
    with pytest.raises(ConfigError, match="cannot go on"):
        asyncio.run(launch(saved_config(folder, ["model.tiny.hidden_size=16", "seed=9"]), resume=folder))
    assert saved_config(folder).seed == 3


def test_an_unfinished_run_is_evaluated_by_its_newest_checkpoint(tmp_path):
    train(tmp_path, steps=1)
    folder = tmp_path / "run"
    finished = asyncio.run(launch_evaluation(saved_config(folder)))
    shutil.rmtree(folder / "model")
    assert asyncio.run(launch_evaluation(saved_config(folder))) == finished
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(ConfigError, match="no model to try"):
        asyncio.run(launch_evaluation(saved_config(folder)))


def test_a_run_goes_on_in_another_mode_if_its_groups_stay_in_their_order(tmp_path):
    changes = "steps=2", "produce.mode=separate"
    folder = train(tmp_path, steps=1) and tmp_path / "run"
    with pytest.raises(ConfigError, match=r"taken with FIFO.* uses Staleness.*: for a run, replay\.policy=fifo$"):
        asyncio.run(launch(saved_config(folder, changes), resume=folder))
    asyncio.run(launch(saved_config(folder, [*changes, "replay.policy=fifo"]), resume=folder))
    assert set(losses(folder)) == {1, 2}


def test_step_time_is_that_of_generation_training_and_sync(tmp_path):
    train(tmp_path, steps=2, evaluate={"every": 1}, checkpoint_every=1)
    row = read_jsonl(tmp_path / "run" / "metrics.jsonl")[-1]
    assert row["time/evaluate_s"] > 0
    assert row["time/checkpoint_s"] > 0
    parts = [row[f"time/{name}_s"] for name in ("generate", "train", "sync")]
    assert row["step_s"] == pytest.approx(sum(parts))
    assert row["sync/share"] == pytest.approx(row["time/sync_s"] / row["step_s"])
    # All float32 weights of its model, once.
    files = (tmp_path / "run" / "model").glob("*.safetensors")
    assert row["sync/bytes"] == sum(tensor.nbytes for file in files for tensor in load_file(file).values())
    assert row["tokens_per_s"] == pytest.approx(row["produce/tokens"] / row["step_s"])


def test_the_log_of_the_library_is_shown_with_one_traceback(tmp_path, capsys):
    data = {"source": "sorting", "arguments": {"length": 2, "letters": 3}, "size": 9}
    task = {**run_table(tmp_path)["tasks"][0], "data": data, "eval_data": {**data, "size": 2}}
    train(tmp_path, tasks=[task], steps=1)
    out = " ".join(capsys.readouterr().out.split())
    assert "prompts are left out: their text is held out" in out
    with RunDisplay() as display, logs_shown(display):
        for number in range(2):
            try:
                raise RuntimeError("broken")
            except RuntimeError:
                logging.getLogger("forebay.somewhere").exception("rollout %d failed", number)
    out = capsys.readouterr().out
    assert out.count("Traceback") == 1
    assert "warning: rollout 1 failed: RuntimeError('broken')" in out
    assert not logging.getLogger("forebay").handlers


def test_the_live_line_counts_the_groups_of_one_step():
    display, seen = RunDisplay(Console(quiet=True)), []
    rejected = [rollout_state(Status.FILTERED)]
    accepted = [rollout_state(Status.COMPLETED)]
    for groups in ((rejected, accepted, accepted), (accepted,)):
        display.count_group("task", accepted)  # of no step
        display.phase("generate")
        display.production(0, 2)
        for group in groups:
            display.count_group("task", group)
            seen.append(display._produced)
        display.phase("train")
    assert seen == [(0, 2), (1, 2), (2, 2), (1, 2)]


def rollout_state(status):
    return RolloutState(message=[{"role": "user", "content": "?"}], status=status)


def test_the_warm_up_renders_only_what_it_uses(tmp_path):
    prompts = [
        Prompt(message=[{"role": "user", "content": chr(65 + n)}], reward_model={"ground_truth": "1"})
        for n in range(50)
    ]
    settings = config(tmp_path, warmup={"steps": 3, "batch_size": 4})

    def drawn(prompts):
        tokenizer = character_tokenizer(string.printable)
        data = [TaskData(prompts, ())]
        examples, held_out = _examples(settings, settings.warmup, tokenizer, data)
        assert held_out == []
        return [tokenizer.decode(prompt_ids) for prompt_ids, *_ in examples]

    assert len(set(drawn(prompts))) == len(drawn(prompts)) == 12
    assert drawn(prompts) == drawn(prompts)
    assert len(drawn(prompts[:5])) == 5


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_finishes_the_step_saves_and_leaves(tmp_path, monkeypatch, number):
    report = steps.report

    def report_and_send(run, train_step, batch, metrics):
        report(run, train_step, batch, metrics)
        if train_step == 1:
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    monkeypatch.setattr(steps, "report", report_and_send)
    _, interrupted = train(tmp_path, steps=100)
    assert interrupted
    done = max(losses(tmp_path / "run"))
    assert done in (1, 2)
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == [f"step_{done:06d}"]
    monkeypatch.undo()
    folder = tmp_path / "run"
    asyncio.run(launch(saved_config(folder, [f"steps={done + 1}"]), resume=folder))
    assert max(losses(folder)) == done + 1
    assert signal.getsignal(number) is before


@pytest.mark.usefixtures("forgotten_modules")
def test_every_recipe_is_a_valid_run_file():
    # One of a cluster, for simulations, is no run file.
    recipes = sorted(set((ROOT / "recipes").rglob("*.toml")) - set((ROOT / "recipes" / "clusters").iterdir()))
    assert len(recipes) > 20
    for path in recipes:
        kind = FragmentRunConfig if "environment" in read_toml(path) else RunConfig
        config = load_config(kind, path)
        if kind is RunConfig:
            assert parse_config(RunConfig, load_back(to_toml(config))) == config, path


def load_back(text):
    import tomllib

    return tomllib.loads(text)


def test_the_command_line(tmp_path):
    from typer.testing import CliRunner

    from forebay.cli.commands import app

    run_file = tmp_path / "run.toml"
    run_file.write_text(to_toml(config(tmp_path / "out")))
    runner = CliRunner()
    dry = runner.invoke(app, ["train", str(run_file), "steps=7", "--dry-run"])
    assert dry.exit_code == 0
    assert "steps = 7" in dry.stdout
    assert "Memory on" in dry.stderr
    assert "trainer: weights" in dry.stderr
    assert not (tmp_path / "out").exists()
    wrong = runner.invoke(app, ["train", str(run_file), "step=7"])
    assert wrong.exit_code == 2
    assert "did you mean 'steps'" in " ".join(wrong.output.split())
    assert runner.invoke(app, ["train"]).exit_code == 2
    done = runner.invoke(app, ["train", str(run_file), "steps=1"])
    assert done.exit_code == 0, done.output
    assert done.output.strip().splitlines()[-1].startswith("held-out accuracy:")
    more = runner.invoke(app, ["train", "--resume", str(tmp_path / "out" / "run"), "steps=2"])
    assert more.exit_code == 0, more.output
    evaluated = runner.invoke(app, ["eval", str(tmp_path / "out" / "run")])
    assert evaluated.exit_code == 0, evaluated.output
    assert "eval" in evaluated.output


def test_functions_beside_the_user_are_found_and_a_bad_judge_fails_the_dry_run(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from forebay.cli.commands import app

    (tmp_path / "my_judges.py").write_text("def half(state):\n    return 0.5\n")
    run_file = tmp_path / "run.toml"
    run_file.write_text(to_toml(config(tmp_path / "out")))
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", os.getcwd())])
    monkeypatch.chdir(tmp_path)
    choose = ["train", str(run_file), "--dry-run", "tasks.0.judge.arguments={}"]
    good = CliRunner().invoke(app, [*choose, "tasks.0.judge.name=my_judges:half"])
    assert good.exit_code == 0, good.output
    wrong = CliRunner().invoke(app, [*choose, "tasks.0.judge.name=my_judges:hlaf"])
    assert wrong.exit_code == 2
    assert "did you mean 'half'" in " ".join(wrong.output.split())
    (tmp_path / "my_rows.py").write_text("def rows():\n    raise RuntimeError('no rows today')\n")
    broken = CliRunner().invoke(app, ["train", str(run_file), 'tasks.0.data={source = "my_rows:rows"}'])
    assert broken.exit_code == 2
    assert f"RuntimeError: no rows today ({tmp_path / 'my_rows.py'}, line 2)" in broken.output
    assert "Traceback" not in broken.output


def test_the_command_line_starts_without_torch():
    code = "import sys, forebay.cli.commands, forebay.runs; forebay.runs.RunConfig;"
    code += "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code]) == 0
