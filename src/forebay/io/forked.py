"""The process that ranks are forked from, and its first import, which leaves the run's terminal and folder alone."""

import gc
import os
import sys
from multiprocessing import forkserver, get_context
from typing import Any

PROCESSES: Any = get_context("spawn" if sys.platform == "darwin" else "forkserver")
"""How ranks are started: forked from a process that only loads `LOADED_ONCE`. Apple's libraries refuse a fork."""
_MODELS = [f"transformers.models.{name}" for name in ("auto.modeling_auto", "llama.modeling_llama")]
LOADED_ONCE = [__name__, "forebay.train.parallel.worker", *_MODELS]
"""They take seconds and some hundred MB: all ranks of this process, also later ones, share them."""

if "from multiprocessing.forkserver import main" in sys.orig_argv[-1]:
    # Ctrl-C and SIGTERM are for the run, after which this ends. Without it no exit code of a rank would be known.
    os.setpgrp()
    # A file of the current folder may have the name of one that a library imports.
    sys.path[:] = filter(None, sys.path)
    # As the command does: with Python's own, what is loaded is visited again and again.
    gc.set_threshold(50_000, 20, 20)


def start_loading() -> None:
    """Start that process, unless it runs; it loads `LOADED_ONCE` beside its caller."""
    PROCESSES.set_forkserver_preload(LOADED_ONCE)
    if PROCESSES.get_start_method() == "forkserver":
        forkserver.ensure_running()
