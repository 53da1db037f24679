"""A run whose ranks torchrun or srun has started: the same training, and an end of all when one ends."""

import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from forebay.config import load_config
from forebay.metrics import read_jsonl
from forebay.runs.config import RunConfig
from forebay.runs.folder import list_checkpoints
from forebay.train.parallel import array_messages, launched, ranks
from forebay.train.parallel.place import Place, find_place
from forebay.train.parallel.ranks import RankError
from warm_python import ADDRESS, SERVER

pytestmark = pytest.mark.usefixtures("warm")

TESTS = Path(__file__).parents[1]
RUN_FILE = """
name = "run"
seed = 5
steps = 2
batch_size = 4
rollouts_per_prompt = 4
checkpoint_every = 1
model = { source = "tiny", tiny = { hidden_size = 16, num_layers = 1, num_heads = 2 } }
train = { lr = 1e-2, mini_batches = 2 }

[[tasks]]
name = "sorting"
data = { source = "sorting", arguments = { length = 3, letters = 5 }, size = 60 }
judge = { name = "parity:parity" }
sample = { max_tokens = 4 }
"""
MAIN = """
import sys
sys.path.insert(0, {tests!r})
from warm_python import WarmPopen, warm_python
from forebay.train.parallel import ranks
ranks.SILENCE_LIMIT_S = {limit_s}
ranks.GRACE_S = 2.0
if __name__ == "__main__":
    with warm_python():
        {work}
"""
FOREBAY = "from forebay.cli import main; main()"
OTHER_MODEL = """
        import os
        from forebay.train.parallel import worker
        if os.environ["SLURM_PROCID"] == "1":
            # As on a machine whose folder of this name has another model.
            here = worker.missing
            worker.missing = lambda sizes: here({p: n + p.endswith(".safetensors") for p, n in sizes.items()})
        from forebay.cli import main
        main()
"""
TORCHRUN = """
        from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
        from torch.distributed.run import main
        # It has them unbuffered.
        subprocess_handler.Popen = lambda args, **how: WarmPopen([a for a in args if a != "-u"], **how)
        main()
"""


def start(work, arguments, limit_s=60.0, **environ):
    """A process of a test, with its output in a pipe."""
    SERVER.begin()
    program = MAIN.format(tests=str(TESTS), limit_s=limit_s, work=work)
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        env={**os.environ, ADDRESS: SERVER.address, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@contextmanager
def tasks_of_srun(arguments, size=2, *, work=FOREBAY, here=None, limit_s=60.0, **environ):
    """The processes that srun would start for ``forebay train`` with these arguments."""
    with socket.socket() as free, ExitStack() as stack:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        tasks = []
        for rank in range(size):
            step = {
                "SLURM_JOB_ID": "1",
                "SLURM_STEP_NUM_TASKS": str(size),
                "SLURM_STEP_TASKS_PER_NODE": here or str(size),
                "SLURM_STEP_NODELIST": "gpu[01-02]",
                "SLURM_PROCID": str(rank),
                "SLURM_LOCALID": str(rank),
                "MASTER_PORT": str(port),
                **environ,
            }
            task = start(work, ["train", *arguments], limit_s, **step)
            stack.callback(task.communicate)
            stack.callback(task.kill)
            tasks.append(task)
        yield tasks


def until_trained(run):
    """Read the run's output until its first step; a long run has a line for few of its steps."""
    for line in run.stdout:
        if line.split()[:1] == ["prompt"]:
            return
    pytest.fail("the run ended first")


@pytest.fixture
def run_file(tmp_path, monkeypatch):
    # torchrun leaves its logs there, and a killed run the file by which its ranks met.
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (tmp_path / "run.toml").write_text(RUN_FILE)
    (tmp_path / "parity.py").write_text("def parity(state):\n    return float(state.response_ids[0] % 2)\n")
    return tmp_path / "run.toml"


def trained(folder):
    rows = [row for row in read_jsonl(folder / "metrics.jsonl") if row["train_step"]]
    return [row[name] for row in rows for name in ("train/loss", "train/grad_norm")]


@pytest.fixture(scope="module")
def of_one_rank(tmp_path_factory, warm):
    folder = tmp_path_factory.mktemp("one")
    (folder / "run.toml").write_text(RUN_FILE)
    (folder / "parity.py").write_text("def parity(state):\n    return float(state.response_ids[0] % 2)\n")
    one = start(FOREBAY, ["train", folder / "run.toml", f"output={folder}"])
    said, _ = one.communicate(timeout=300)
    assert one.returncode == 0, said
    return trained(folder / "run")


def test_two_processes_of_torchrun_train_as_one_rank(run_file, tmp_path, of_one_rank):
    command = ["--standalone", "--nproc-per-node=2", "-m", "forebay", "train", run_file, f"output={tmp_path}"]
    torchrun = start(TORCHRUN, command)
    said, _ = torchrun.communicate(timeout=300)
    assert torchrun.returncode == 0, said
    assert len(of_one_rank) == 4
    assert min(map(abs, of_one_rank)) > 1e-3
    assert trained(tmp_path / "run") == pytest.approx(of_one_rank, abs=1e-5)
    assert load_config(RunConfig, tmp_path / "run" / "run.toml").train.ranks == 2


@pytest.mark.soak
def test_torchrun_starts_a_killed_run_again_and_it_goes_on(run_file, tmp_path):
    kill_once = "    if flag.exists():\n        flag.unlink()\n        os.kill(os.getpid(), signal.SIGKILL)\n"
    with start(FOREBAY, ["train", run_file, f"output={tmp_path}"]) as once:
        once.communicate(timeout=300)
    judge, flag = tmp_path / "parity.py", tmp_path / "flag"
    flag.touch()
    head, body = judge.read_text().split("    return")
    judge.write_text(
        f"import os, signal, pathlib\nflag = pathlib.Path({str(flag)!r})\n{head}{kill_once}    return{body}"
    )
    again = ["-m", "forebay", "train", "--resume", tmp_path / "run", "steps=3", "train.ranks=2"]
    torchrun = start(TORCHRUN, ["--standalone", "--nproc-per-node=2", "--max-restarts=1", *again])
    said, _ = torchrun.communicate(timeout=300)
    assert torchrun.returncode == 0, said
    assert not flag.exists()
    assert [row["train_step"] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3]


def test_tasks_of_srun_on_two_machines_train_as_one_rank(run_file, tmp_path, of_one_rank):
    """Machines by the variables alone: weights go over connections, not through memory."""
    addresses = [each.address for own in psutil.net_if_addrs().values() for each in own if each.family == 2]
    address = max(addresses, key=lambda address: not address.startswith("127."))
    arguments = [run_file, f"output={tmp_path}", "train.ranks=2"]
    with tasks_of_srun(arguments, here="1(x2)", MASTER_ADDR=address) as (run, rank):
        said, _ = run.communicate(timeout=300)
        assert run.returncode == 0, said
        assert (rank.wait(timeout=300), rank.stdout.read()) == (0, "")
    assert trained(tmp_path / "run") == pytest.approx(of_one_rank, abs=1e-5)


def test_a_killed_rank_ends_the_run_with_a_sentence_though_torchrun_ends_it_too(run_file, tmp_path):
    with tasks_of_srun([run_file, f"output={tmp_path}", "steps=100000"]) as (run, rank):
        until_trained(run)
        rank.kill()
        # As torchrun does to all others.
        run.terminate()
        said, _ = run.communicate(timeout=300)
        assert run.returncode == 2
        assert "rank 1 died in " in said.partition("error: ")[2]
        assert f"has to start all again, to go on with --resume {tmp_path / 'run'}" in said


def test_a_killed_run_ends_its_ranks(run_file, tmp_path):
    with tasks_of_srun([run_file, f"output={tmp_path}", "steps=100000"]) as (run, rank):
        until_trained(run)
        run.kill()
        assert (rank.wait(timeout=300), rank.stdout.read()) == (0, "")


def test_a_stopped_rank_is_noticed_and_no_other_waits_for_it(run_file, tmp_path):
    """One is in a collective, where it would wait for ten minutes."""
    arguments = [run_file, f"output={tmp_path}", "steps=100000"]
    with tasks_of_srun(arguments, 3, limit_s=6.0) as (run, other, stopped):
        until_trained(run)
        stopped.send_signal(signal.SIGSTOP)
        said, _ = run.communicate(timeout=300)
        assert run.returncode == 2
        assert "rank 2 gave no sign of life for 6 s in " in said.partition("error: ")[2]
        assert other.wait(timeout=300) in (0, 1)


def test_a_signal_to_all_has_the_step_finished_and_saved(run_file, tmp_path):
    with tasks_of_srun([run_file, f"output={tmp_path}", "steps=100000"]) as (run, rank):
        until_trained(run)
        for task in (rank, run):
            task.terminate()
        said, _ = run.communicate(timeout=300)
        assert run.returncode == 130, said
        assert "Stopping: this step is finished" in said
        assert (rank.wait(timeout=300), rank.stdout.read()) == (0, "")
    assert list_checkpoints(tmp_path / "run")


def test_another_number_of_ranks_than_processes_is_one_sentence(run_file, tmp_path):
    with tasks_of_srun([run_file, f"output={tmp_path}", "train.ranks=4"]) as (run, rank):
        said, _ = run.communicate(timeout=300)
        expected = "error: train.ranks = 4, but 2 processes were started: start 4, or leave train.ranks out\n"
        assert (run.returncode, said) == (2, expected)
        assert (rank.wait(timeout=300), rank.stdout.read()) == (0, "")


def test_a_rank_that_sees_another_model_is_named(run_file, tmp_path):
    with tasks_of_srun([run_file, f"output={tmp_path}"], work=OTHER_MODEL) as (run, rank):
        said, _ = run.communicate(timeout=300)
        expected = r"error: rank 1 does not see the folder '[^']*tiny-[^']*' as the run does: mount it on its machine"
        assert re.search(expected, said), said
        assert (run.returncode, rank.wait(timeout=300)) == (2, 0)


def test_a_rank_that_does_not_come_is_named_and_a_stranger_is_none(monkeypatch):
    monkeypatch.setattr(ranks, "START_LIMIT_S", 1.0)
    monkeypatch.setattr(
        launched, "_store", lambda place: SimpleNamespace(set=lambda _, told: connect(told), delete_key=deleted.append)
    )
    strangers, deleted = [], []

    def connect(told):
        host, port, _ = told.split()
        strangers.append(socket.create_connection((host, int(port))))
        array_messages.send(array_messages.connect(strangers[0]), [1, 0, b"another token's"])

    beside = launched.joined(Place(0, 3, 0, 3, 0, "127.0.0.1", has_store=True))
    with pytest.raises(RankError, match=r"ranks 1, 2 of 3 did not come within 1 s"), beside:
        pass
    assert (launched.beside, deleted) == (None, ["forebay"])
    strangers[0].close()


def test_a_rank_without_a_run_says_so(monkeypatch):
    monkeypatch.setattr(ranks, "START_LIMIT_S", 0.1)
    monkeypatch.setattr(launched, "_on_signals", lambda handler: None)
    run = launched.joined(Place(1, 2, 0, 2, 9, "127.0.0.1", has_store=True))
    with pytest.raises(RankError, match=r"rank 1 found no run by 127.0.0.1:9: .*timed out"), run:
        pass


def test_the_store_of_one_machine_is_on_the_loopback_alone():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    store = launched._store(Place(0, 2, 0, 2, port, "127.0.0.1", has_store=False))
    store.set("forebay", "here")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), 5)
    assert launched._store(Place(1, 2, 1, 2, port, "127.0.0.1", has_store=False)).get("forebay") == b"here"


TORCHRUN_SAYS = {
    "RANK": "9",
    "WORLD_SIZE": "16",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "8",
    "MASTER_ADDR": "gpu1",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SRUN_SAYS = {
    "SLURM_JOB_ID": "15001",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
    "SLURM_STEP_NODELIST": "gpu[03-05,9],cpu1",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
}


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({}, None),
        (TORCHRUN_SAYS, Place(9, 16, 1, 8, 29400, "gpu1", True)),
        (TORCHRUN_SAYS | {"WORLD_SIZE": "1"}, None),
        (SRUN_SAYS, Place(9, 16, 1, 8, 15001, "gpu03", False)),
        (SRUN_SAYS | {"SLURM_STEP_NODELIST": "a-1,b-2"}, Place(9, 16, 1, 8, 15001, "a-1", False)),
        (SRUN_SAYS | {"MASTER_PORT": "7", "MASTER_ADDR": "x"}, Place(9, 16, 1, 8, 7, "x", False)),
        (SRUN_SAYS | {"SLURM_STEP_TASKS_PER_NODE": "16"}, Place(9, 16, 1, 16, 15001, "127.0.0.1", False)),
        (SRUN_SAYS | {"SLURM_STEP_NUM_TASKS": "1"}, None),
        # torchrun under srun, and a batch script, whose job has several tasks.
        (SRUN_SAYS | TORCHRUN_SAYS, Place(9, 16, 1, 8, 29400, "gpu1", True)),
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "16", "SLURM_PROCID": "0"}, None),
    ],
)
def test_the_environment_names_the_place_of_a_process(monkeypatch, environ, place):
    for name in [*TORCHRUN_SAYS, *SRUN_SAYS]:
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert find_place.__wrapped__() == place
    # For a server that the run starts; that of a process alone stays as it was.
    left = {name: os.environ[name] for name in TORCHRUN_SAYS if name in os.environ}
    assert left == ({name: environ[name] for name in TORCHRUN_SAYS if name in environ} if place is None else {})
