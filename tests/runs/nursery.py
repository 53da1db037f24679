"""Runs that can be killed: imports everything once, then forks a process for each command line it reads.

::

    stdin                                      stdout
    ["train", "run.toml", ...]  or             @pid N
    ["scripted", FOLDER, ...]                  what the process prints; @end CODE, if it comes to its end
    [..., {"NAME": "environment"}]
    reap                                       @exit CODE

Until ``reap`` the process keeps its number even if it has ended, so whoever kills it kills nobody else.
"""

import json
import os
import sys
import traceback

# Some only to have them imported before the fork, because it takes long.
import peft  # noqa: F401
import scripted_run

import forebay.runs.launch  # noqa: F401
from forebay.cli import main as forebay_command
from forebay.models import ModelConfig, load_model, load_tokenizer, resolve_model


def warm_up():
    """Have everything imported that a run with a tiny model imports when it is used."""
    folder = resolve_model(ModelConfig(source="tiny"), seed=0)
    load_model(folder)
    load_tokenizer(folder)


def run(arguments):
    if arguments[0] == "scripted":
        scripted_run.main(arguments[1:])
    else:
        sys.argv = ["forebay", *arguments]
        forebay_command()


def become(arguments):
    """Never returns: this process is the run now."""
    code = 1
    try:
        if isinstance(arguments[-1], dict):
            os.environ |= arguments.pop()
        run(arguments)
        code = 0
    except SystemExit as leaving:
        code = leaving.code or 0
    except BaseException:
        traceback.print_exc(file=sys.stdout)
    finally:
        print("\n@end", code, flush=True)
        os._exit(code)


def main():
    warm_up()
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            become(json.loads(line))
        print("@pid", pid, flush=True)
        sys.stdin.readline()
        _, status = os.waitpid(pid, 0)
        # A process that was killed may have left half a line.
        print("\n@exit", os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
