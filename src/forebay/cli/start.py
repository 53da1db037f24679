"""The beginning of the ``forebay`` command, before its libraries are loaded, which takes a second."""

import gc
import signal

from forebay.tracebacks import INTERRUPTED, left_by_ctrl_c


def main() -> None:
    """The entry point of the ``forebay`` command."""
    # With Python's own, 700, it visits the objects of torch and transformers again and again as they are loaded.
    gc.set_threshold(50_000, 20, 20)
    with left_by_ctrl_c():
        from forebay.cli.commands import app
    try:
        app()
    except SystemExit as end:
        if end.code == INTERRUPTED:
            # A second Ctrl-C would only print what the libraries think of it while they close.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise
