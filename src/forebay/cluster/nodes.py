"""Whether every machine of a cluster sees the run's files; asked once, before parts start.

::

    check_nodes: a new file in the run's folder, the model's files and their sizes
                    | a task on every other machine
                    v
                 missing --> ConfigError: the machine, the folder
"""

import os
from pathlib import Path

from forebay.cluster.library import import_ray, on_node
from forebay.cluster.supervisor import all_started
from forebay.config import ConfigError
from forebay.io.elsewhere import files_to_see, missing


def check_nodes(run_folder: Path, model_folder: Path) -> None:
    """Find out whether all machines see both folders under the paths that this one has for them.

    Raises:
        ConfigError: one of them does not, or cannot be asked.
    """
    ray = import_ray()
    here = ray.get_runtime_context().get_node_id()
    others = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] != here]
    run_folder.mkdir(parents=True, exist_ok=True)
    with files_to_see(run_folder, model_folder) as sizes:
        look, asked = ray.remote(num_cpus=0)(missing), {}
        for node in others:
            name = f"machine {node['NodeName']} (node {node['NodeID'][:8]})"
            asked[name] = look.options(scheduling_strategy=on_node(node["NodeID"])).remote(sizes)
        for name, path in all_started(asked).items():
            if path is not None:
                raise ConfigError(
                    f"{name} does not see the folder {os.path.dirname(path)!r} as this machine does: mount it "
                    f"there under the same path, or take that machine off the cluster"
                )
