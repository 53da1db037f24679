"""The files in deploy/ parse, and each starts a run file of this version with keys that it has."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from forebay.config import load_config
from forebay.runs.config import RunConfig

DEPLOY = Path(__file__).parents[1] / "deploy"


def overrides(command):
    """The ``key=value`` of the line that trains, and the run file it names."""
    line = next(line for line in command.splitlines() if "forebay train " in line and "--resume" not in line)
    run_file, *given = shlex.split(line.partition("forebay train ")[2])
    return run_file, [word for word in given if "=" in word]


def check_shell(script):
    checked = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, timeout=300)
    assert (checked.returncode, checked.stderr) == (0, "")


def check_run(given=()):
    config = load_config(RunConfig, DEPLOY / "two_nodes.toml", given)
    assert config.cluster.name == "ray"
    return config


def gpus_asked(config):
    arguments = config.cluster.arguments
    engines = arguments["num_engines"] * arguments["gpus_per_engine"]
    return engines + config.train.ranks * arguments["gpus_per_trainer"]


def test_a_slurm_job_starts_ray_on_its_nodes_and_the_run():
    script = (DEPLOY / "slurm.sh").read_text()
    check_shell(script)
    # Each node's Ray and the run have the same token, whatever is in a home that they share.
    assert -1 < script.find("export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=") < script.find("\nsrun ")
    head, *_ = script.split("set -euo pipefail")
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", head, re.MULTILINE))
    assert asked["ntasks-per-node"] == "1"
    assert int(asked["nodes"]) * int(asked["gpus-per-node"]) == gpus_asked(check_run())
    without = subprocess.run(["bash", DEPLOY / "slurm.sh"], text=True, capture_output=True, timeout=300)
    assert (without.returncode, without.stderr.split(":")[0]) == (2, "usage")


def test_a_slurm_job_has_torchrun_start_a_rank_for_every_gpu():
    from torch.distributed.run import get_args_parser

    script = (DEPLOY / "torchrun_slurm.sh").read_text()
    check_shell(script)
    head, *_ = script.split("set -euo pipefail")
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", head, re.MULTILINE))
    words = shlex.split(script.replace("\\\n", "").splitlines()[-1])
    job = {"$SLURM_NNODES": asked["nodes"], "$SLURM_JOB_ID": "7", "$head": "gpu1"}
    for name, value in job.items():
        words = [word.replace(name, value) for word in words]
    given = get_args_parser().parse_args(words[words.index("torchrun") + 1 :])
    assert (given.module, given.training_script, given.training_script_args) == (True, "forebay", ["train", "$@"])
    assert (asked["ntasks-per-node"], asked["gpus-per-node"]) == ("1", given.nproc_per_node)
    named = re.search(r"recipes/\S+\.toml", head)[0]
    config = load_config(RunConfig, DEPLOY.parent / named, [])
    assert config.train.ranks == int(given.nnodes) * int(given.nproc_per_node)
    without = subprocess.run(["bash", DEPLOY / "torchrun_slurm.sh"], text=True, capture_output=True, timeout=300)
    assert (without.returncode, without.stderr.split(":")[0]) == (2, "usage")


def test_skypilot_rents_the_gpus_that_the_run_asks_for():
    task = yaml.safe_load((DEPLOY / "skypilot.yaml").read_text())
    known = {"name", "num_nodes", "resources", "workdir", "volumes", "envs", "setup", "run"}
    assert task.keys() == known
    for script in (task["setup"], task["run"]):
        check_shell(script)
    run_file, given = overrides(task["run"])
    assert (run_file, task["envs"]) == ("$RUN", {"RUN": "deploy/two_nodes.toml"})
    config = check_run(given)
    assert str(config.output) in task["volumes"]
    assert int(task["resources"]["accelerators"].split(":")[1]) * task["num_nodes"] == gpus_asked(config)


def test_kuberay_has_a_pod_for_every_gpu_and_one_folder_for_all():
    job = yaml.safe_load((DEPLOY / "kuberay.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    spec = job["spec"]
    run_file, given = overrides(spec["entrypoint"])
    config = check_run(given)
    cluster = spec["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    assert workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]
    gpus = 0
    for group, count in ((cluster["headGroupSpec"], 1), (workers, workers["replicas"])):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        gpus += count * int(container["resources"]["limits"].get("nvidia.com/gpu", 0))
        # Kubernetes refuses a GPU whose request differs from its limit.
        assert container["resources"]["requests"] == container["resources"]["limits"]
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert set(mounts.values()) == {volume["name"] for volume in pod["volumes"]}
        assert mounts[str(config.output)] == mounts[str(Path(run_file).parent)] == "runs"
    assert gpus == gpus_asked(config)


@pytest.mark.parametrize("name", ["slurm.sh", "torchrun_slurm.sh", "skypilot.yaml", "kuberay.yaml"])
def test_what_a_file_names_is_there(name):
    text = (DEPLOY / name).read_text()
    for path in re.findall(r"deploy/[\w.]+\.(?:toml|sh|yaml|cuda)", text):
        assert (DEPLOY.parent / path).exists() or path == "deploy/other.toml"
