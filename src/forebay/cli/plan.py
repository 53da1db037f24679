"""The ``forebay plan`` command: does a run fit, and how long will a step take? Nothing is trained.

::

    forebay plan RUN.toml [key=value ...]                     on this machine
    forebay plan RUN.toml [key=value ...] --gpus H100-80GB    on another one
"""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from forebay.cli.errors import Overrides, one_message
from forebay.config import load_config
from forebay.runs.config import RunConfig


def plan(
    run_file: Annotated[Path, typer.Argument(help="A TOML run file.")],
    overrides: Overrides = None,
    gpus: Annotated[
        str | None, typer.Option(metavar="NAME", help="H100-80GB, 8xH100-80GB, 2x8xH100-80GB: of 2 machines.")
    ] = None,
    network: Annotated[
        float | None, typer.Option(min=0.1, help="Gbit/s of a machine; left out: as its maker builds it.")
    ] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of the longest prompt; left out: that of the data.")
    ] = None,
) -> None:
    """Say what memory a run takes, by part, whether it fits, and how long a step will take."""
    with one_message():
        from forebay.plan import make_plan, parse_devices, this_machine
        from forebay.plan.report import show_plan

        config = load_config(RunConfig, run_file, overrides or [])
        device = this_machine(config.device) if gpus is None else parse_devices(gpus, network=network)
        found = make_plan(config, device, prompt_tokens=prompt_tokens)
        show_plan(found, Console(width=None if sys.stdout.isatty() else 100))
        if not found.fits:
            raise typer.Exit(1)


def show_plan_here(config: RunConfig, console: Console) -> None:
    """Print the plan of `config` on this machine, or in one line why there is none."""
    from forebay.plan import make_plan, this_machine
    from forebay.plan.estimate import NO_PLAN
    from forebay.plan.report import show_plan

    try:
        show_plan(make_plan(config, this_machine(config.device)), console)
    except NO_PLAN as error:
        console.print(f"no plan of the memory: {error}", markup=False, highlight=False)
