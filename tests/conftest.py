"""Settings every test runs under: one thread, no network, and how hard the randomized tests try."""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from warm_python import ADDRESS, SERVER, warm_fork_servers, warm_python

# Read by torch, tokenizers and the hub client when a test module first imports them.
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")

warm_fork_servers()

SOAK = os.environ.get("FOREBAY_SOAK") == "1"

# The short runs try the same examples every time, so that a change is not blamed for another's bad luck.
settings.register_profile("fast", max_examples=50, derandomize=True, deadline=None)
settings.register_profile("soak", max_examples=2000, deadline=None, print_blob=True)
settings.load_profile("soak" if SOAK else "fast")

ON_RAY = re.compile(r"cluster/test_(ray_\w+|buffer|nodes)\.py|test_replay_ray\.py|test_fragment_cluster\.py|\[ray\b")
"""Tests on a cluster of Ray, which takes seconds to start and has many processes."""
LONGEST = (
    "train/test_images_on_ranks.py",
    "train/test_ranked_training.py",
    "board/test_board_page.py",
    "plan/test_memory.py",
    "plan/test_one_gpu.py",
    "runs/test_separate_run.py",
    "runs/test_killed_separate_run.py",
    "runs/test_launched_run.py",
    "train/test_gpu_benchmarks.py",
    "plan/test_plan.py",
    "plan/test_traffic.py",
    "runs/test_run_store.py",
    "runs/test_colocated_run.py",
)
"""Files that take a worker a minute or so: last of all, one would keep the others waiting."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Of several workers one takes a whole file, so that what a module sets up is set up once, or all tests on Ray.

    Not by `xdist_group`, which xdist 3.8 leaves unheeded with pytest 9.2 and says nothing. In the order of the
    collection, where the longest come first: xdist would have the files with the most tests first.
    """
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "ray" if ON_RAY.search(nodeid) else super()._split_scope(nodeid)

    if config.getvalue("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False
    return ByFile(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes() -> None:
    # One for all workers, which find it by their environment.
    os.environ[ADDRESS] = SERVER.begun()


def pytest_collection_finish() -> None:
    # 750,000 objects of libraries and test modules, which every full collection would visit: half a second
    # of CPU, and each run makes one when it starts.
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        order = {f"tests/{name}": number for number, name in enumerate(LONGEST, 1)}

        def place(item: pytest.Item) -> int:
            return 0 if ON_RAY.search(item.nodeid) else order.get(item.nodeid.partition("::")[0], len(order) + 1)

        items.sort(key=place)
    if not SOAK:
        for item in items:
            if item.get_closest_marker("soak"):
                item.add_marker(pytest.mark.skip(reason="long; FOREBAY_SOAK=1 runs it"))
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu:
        import torch

        if not torch.cuda.is_available():
            for item in on_gpu:
                item.add_marker(pytest.mark.skip(reason=f"torch {torch.__version__} sees no CUDA device"))


@pytest.fixture
def forgotten_modules() -> Iterator[None]:
    """Modules beside run files, of which several have one name, are forgotten before and after the test."""
    here, path = Path(__file__).parent, list(sys.path)
    folders = here.parent / "recipes", here / "given_on_pages"

    def forget() -> None:
        for name, module in list(sys.modules.items()):
            file = Path(getattr(module, "__file__", None) or "/")
            if any(map(file.is_relative_to, folders)):
                del sys.modules[name]

    forget()
    yield
    forget()
    sys.path[:] = path


@pytest.fixture(scope="module")
def warm() -> Iterator[None]:
    """Python programs that the tests of a module start have torch and transformers imported already."""
    with warm_python():
        yield
