"""The first import of a process that others are forked from: it leaves the run's terminal and folder alone."""

import os
import sys

if "from multiprocessing.forkserver import main" in sys.orig_argv[-1]:
    # Ctrl-C and SIGTERM are for the run, after which this ends. Without it no exit code of a rank would be known.
    os.setpgrp()
    # A file of the current folder may have the name of one that a library imports.
    sys.path[:] = filter(None, sys.path)
