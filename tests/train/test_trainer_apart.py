"""A trainer in a process of its own is the one of this process, to the bit; and the process itself."""

import json
import logging
import os
import signal
import sys
from multiprocessing import forkserver, util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import safetensors
import torch

from forebay.io.shared import MemoryFile, lay_out, views
from forebay.train import LocalRanks, RankError, TrainConfig, TrainController
from forebay.train.objective.losses import POLICY_LOSSES
from forebay.train.parallel.ranks import START
from warm_python import START_OWN


@pytest.fixture(scope="module")
def process():
    """One process for all trainers of this file, one after the other."""
    torch.set_num_threads(1)
    ranks = LocalRanks(1)
    yield ranks
    ranks.close()


def test_ranks_have_the_gpus_from_the_one_that_is_named_on(make_model, monkeypatch):
    told = []

    def ask(self, method, arguments):
        if method != START:
            raise RankError("no GPU is here")
        told.append([(gpu, device) for _, gpu, _, _, _, device, *_ in arguments])

    monkeypatch.setattr(LocalRanks, "_ask", ask)
    for device, ranks in (("cuda:1", 1), ("cuda:1", 2), ("cuda", 2), ("cpu", 1)):
        with pytest.raises(RankError, match="no GPU"):
            TrainController(make_model(), TrainConfig(ranks=ranks), pad_token_id=0, device=device, apart=True)
    assert [[gpu for gpu, _ in each] for each in told] == [[1], [1, 2], [0, 1], [0]]
    assert {torch.device(device).type for each in told for _, device in each} == {"cuda", "cpu"}


def trainer_for(model, process=None, *, apart=False, **settings):
    config = TrainConfig(**{"lr": 1e-2, "token_budget": 24, **settings})
    return TrainController(model, config, pad_token_id=0, total_steps=4, seed=7, ranks=process, apart=apart)


def files_of(trainer, folder):
    """Every file of a checkpoint by name; of one with tensors its facts and these, whose order is not fixed."""
    trainer.save(folder)
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    del files["checksums.json"]
    for name in [name for name in files if name.endswith(".safetensors")]:
        head = json.loads(files[name][8 : 8 + int.from_bytes(files[name][:8], "little")])
        files[name] = [head.get("__metadata__"), *sorted(safetensors.deserialize(files[name]), key=str)]
    return files


def numbers(batch):
    return {name: value for name, value in batch.metrics.items() if not name.endswith("_s")}


def halved(inputs, config):
    """A loss of one's own, found by its module."""
    found = POLICY_LOSSES["clipped"](inputs, config)
    return found._replace(loss=found.loss / 2)


GAE = {"advantage": "gae", "critic_lr": 1e-3}
# Each kind of number that goes to the process or comes from it, and each layout.
CASES = [
    {"mini_batches": 3, "epochs": 2, "kl_coef": 0.1, "entropy_coef": 0.01, "schedule": "cosine"},
    {**GAE, "layout": "shared_prompt", "mini_batches": 2},
    {**GAE, "lora_rank": 2, "kl_coef": 0.1, "layout": "packed"},
    {"gradient_checkpointing": True, "correction": "token_tis", "weight_decay": 0.1},
    {"moments": "8bit"},
    {"moments": "cpu"},
    {"dtype": "bfloat16"},
    {"loss": f"{__name__}:halved"},
    *(
        pytest.param(settings, marks=pytest.mark.soak)
        for settings in (
            {"layout": "padded"},
            {"layout": "packed", "loss": "gspo", "normalization": "sequence-mean"},
            {"layout": "packed", "token_budget": 40},
            {"layout": "shared_prompt", "loss": "cispo"},
            {"frozen": ["*embed_tokens", "*layers.0", "*layers.1.*_proj"], "kl_coef": 0.1},
        )
    ),
]


@pytest.mark.parametrize("settings", CASES, ids=str)
def test_it_trains_to_the_bit_as_in_this_process_and_either_goes_on_from_the_others_checkpoint(
    make_model, make_groups, process, tmp_path, settings
):
    here, apart = trainer_for(make_model(), **settings), trainer_for(make_model(), process, **settings)
    for step in range(2):
        groups = make_groups(8, seed=step, masked=True)
        expected, got = here.fit(groups), apart.fit(groups)
        assert numbers(got) == numbers(expected)
        for name in ("old_logprobs", "ref_logprobs", "values", "advantages", "trainer_logprobs"):
            ours, theirs = getattr(expected, name), getattr(got, name)
            assert (ours is None) == (theirs is None)
            assert ours is None or np.array_equal(ours, theirs, equal_nan=True), name
    written = files_of(here, tmp_path / "here"), files_of(apart, tmp_path / "apart")
    assert written[0].keys() == written[1].keys()
    assert [name for name, content in written[0].items() if content != written[1][name]] == []
    groups = make_groups(seed=2)
    expected = numbers(here.fit(groups))
    for folder, place in (("apart", None), ("here", process)):
        resumed = trainer_for(make_model(), place, **settings)
        assert resumed.resume(tmp_path / folder) == 2
        assert numbers(resumed.fit(groups)) == expected


def fail_telling(inputs, config):
    """A loss that logs a warning, and says what the process has in its environment."""
    logging.getLogger("forebay.losses").warning("a warning of %d", 1)
    raise ValueError(f"the environment says {os.environ.get('SAID')!r}")


def test_its_warnings_and_its_errors_come_here_and_its_environment_is_that_of_its_start(
    make_model, make_groups, monkeypatch, caplog
):
    monkeypatch.setenv("SAID", "now")
    config = TrainConfig(loss=f"{__name__}:fail_telling")
    trainer = TrainController(make_model(), config, pad_token_id=0, apart=True)
    with pytest.raises(ValueError, match="the environment says 'now'"):
        trainer.fit(make_groups())
    trainer.close()
    assert caplog.messages == ["a warning of 1"]


def leave(inputs, config):
    sys.exit("the loss has left")


def test_a_loss_that_ends_its_process_is_an_error_and_no_hang(make_model, make_groups):
    trainer = trainer_for(make_model(), apart=True, loss=f"{__name__}:leave")
    with pytest.raises(RankError, match="rank 0 of 1 failed in update: SystemExit: the loss has left"):
        trainer.fit(make_groups())
    trainer.close()


def test_a_script_whose_trainer_is_apart_needs_no_main_guard(make_model, tmp_path, monkeypatch):
    script, ran = tmp_path / "script.py", tmp_path / "ran"
    script.write_text(f"open({str(ran)!r}, 'w').close()")
    main = ModuleType("__main__")
    main.__file__ = str(script)
    monkeypatch.setitem(sys.modules, "__main__", main)
    TrainController(make_model(), TrainConfig(), pad_token_id=0, apart=True).close()
    assert not ran.exists()
    # With several ranks a model may be of a class of the script.
    LocalRanks(1).close()
    assert ran.exists()


def test_what_it_is_forked_from_is_out_of_reach_of_ctrl_c_and_of_files_in_the_current_folder(tmp_path, monkeypatch):
    # Killed, it is started again.
    LocalRanks(1).close()
    before = forkserver._forkserver._forkserver_pid
    os.kill(before, signal.SIGKILL)
    os.waitid(os.P_PID, before, os.WEXITED | os.WNOWAIT)
    monkeypatch.setattr(util, "spawnv_passfds", START_OWN)
    (tmp_path / "csv.py").write_text("raise RuntimeError('not the one that is meant')")
    monkeypatch.chdir(tmp_path)
    ranks = LocalRanks(1)
    pid = forkserver._forkserver._forkserver_pid
    assert os.getpgid(pid) == pid
    # Threads would be missing in what is forked, with the locks that they hold.
    assert len(os.listdir(f"/proc/{pid}/task")) == 1
    ranks.close()
    forkserver._forkserver._stop()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_only_memory_that_is_used_again_stays_mapped(make_model, process):
    trainer = trainer_for(make_model(), process)
    maps = Path(f"/proc/{process.pids[0]}/maps")
    weights = dict(trainer.live_weights().sizes())
    layout, num_bytes = lay_out(weights.items())

    def num_mapped():
        return maps.read_text().count("forebay-weights")

    before = num_mapped()
    for _ in range(2):
        assert dict(trainer._learner.weights()).keys() == weights.keys()
    assert num_mapped() == before
    memory = MemoryFile(num_bytes)
    for _ in range(2):
        trainer.live_weights().copy_to(layout, memory)
    assert num_mapped() == before + 1
    given = dict(trainer._learner.weights())
    assert all(torch.equal(value, given[name]) for name, value in views(layout, memory.data))
