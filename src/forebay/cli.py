"""The ``forebay`` command.

::

    forebay train RUN.toml [key=value ...] [--dry-run] [--overwrite]
    forebay train RUN.toml [key=value ...] --check        one sample of everything, nothing trained
    forebay train --resume RUN_FOLDER [key=value ...]
    forebay eval  RUN_FOLDER [key=value ...]
    forebay replay RUN_FOLDER [--until STEP]
    forebay simulate RUN.toml [key=value ...] --cluster CLUSTER.toml [--sweep key=a,b]
    forebay buffer inspect|show|query|export|migrate|serve ...
    forebay ledger RUN_FOLDER
    forebay keys [PATTERN]
    forebay init [NAME] [FOLDER]

Errors a person can mend are one message and exit status 2; an interrupted run exits with 130.
"""

from __future__ import annotations

import asyncio
import shlex
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from forebay import __version__, buffer_cli, init_cli, keys, replay_cli, simulate_cli
from forebay.command import INTERRUPTED, one_message
from forebay.config import ConfigError

app = typer.Typer(
    help="Reinforcement learning for language models: rollouts, replay and training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Changes to it: train.lr=1e-4, tasks.0.weight=2."),
]


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
) -> None:
    if version:
        typer.echo(f"forebay {__version__}")
        raise typer.Exit


@app.command()
def train(
    run_file: Annotated[
        Path | None, typer.Argument(help="A TOML run file; see recipes/. Left out with --resume.")
    ] = None,
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved run file only.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Try data, model, engine and judge on one sample; train nothing.")
    ] = False,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with the run in this folder, from its last checkpoint.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier run in the run's folder.")
    ] = False,
    verify_weights: Annotated[
        bool,
        typer.Option("--verify-weights", help="Prove after every hand-over that engines hold the weights."),
    ] = False,
) -> None:
    """Train a model as a run file says, or go on with an interrupted run."""
    if resume is not None and run_file is not None:
        # With --resume the first positional argument is an override, not a file.
        overrides, run_file = [str(run_file), *(overrides or [])], None
    if verify_weights:
        overrides = [*(overrides or []), "verify_weights=true"]
    with one_message():
        if check:
            _check(run_file, overrides or [])
        else:
            _train(run_file, overrides or [], dry_run, resume, overwrite)


@app.command(name="eval")
def evaluate(
    folder: Annotated[Path, typer.Argument(help="The folder of a run.")],
    overrides: Overrides = None,
    model: Annotated[
        Path | None, typer.Option(help="A model folder to try instead of the run's newest.")
    ] = None,
) -> None:
    """Try a trained model on the held-out prompts of its run, and print the metrics."""
    with one_message():
        _evaluate(folder, overrides or [], model)


app.add_typer(buffer_cli.app, name="buffer")
app.command(name="ledger")(buffer_cli.show_ledger)
app.command(name="simulate")(simulate_cli.simulate_run)
app.command(name="replay")(replay_cli.replay)
app.command(name="keys")(keys.show_keys)
app.command(name="init")(init_cli.init)


def main() -> None:
    """The entry point of the ``forebay`` command."""
    try:
        app()
    except SystemExit as end:
        if end.code == INTERRUPTED:
            # A second Ctrl-C would only print what the libraries think of it while they close.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise


def _train(
    run_file: Path | None, overrides: list[str], dry_run: bool, resume: Path | None, overwrite: bool
) -> None:
    if _is_in_environments(resume / "run.toml" if resume is not None else run_file):
        _train_in_environments(run_file, overrides, dry_run, resume, overwrite)
        return
    from forebay.config import load_config
    from forebay.runs.config import RunConfig, to_toml
    from forebay.train.papers import differences

    if resume is not None:
        from forebay.runs.folder import saved_config

        config = saved_config(resume, overrides)
    elif run_file is not None:
        config = load_config(RunConfig, run_file, overrides)
    else:
        raise ConfigError("name a run file, for example recipes/demo_tiny.toml, or --resume RUN_FOLDER")
    if dry_run:
        typer.echo(to_toml(config), nl=False)
        for difference in differences(config.train):
            typer.echo(f"warning: {difference}", err=True)
        return
    from forebay.runs.launch import launch

    last_line, interrupted = asyncio.run(launch(config, resume=resume, overwrite=overwrite))
    if last_line:
        typer.echo(last_line)
    if interrupted:
        sys.exit(INTERRUPTED)


def _check(run_file: Path | None, overrides: list[str]) -> None:
    if run_file is None:
        raise ConfigError("--check is for a run file: forebay train RUN.toml --check")
    if _is_in_environments(run_file):
        raise ConfigError("--check is for runs that train language models; --dry-run reads any run file")
    from forebay.config import load_config
    from forebay.runs.config import RunConfig
    from forebay.runs.launch import silence_progress_bars
    from forebay.runs.preflight import try_all

    silence_progress_bars()
    asyncio.run(try_all(load_config(RunConfig, run_file, overrides), typer.echo))
    command = shlex.join(["forebay", "train", str(run_file), *overrides])
    typer.echo(f"all of it works; nothing was trained or kept. To start: {command}")


def _is_in_environments(run_file: Path | None) -> bool:
    """Whether the run file has an ``[environment]`` table: another kind of run, with a recipe of its own."""
    from forebay.config import read_toml

    # A missing file gets its message from whoever reads it next.
    return run_file is not None and run_file.exists() and "environment" in read_toml(run_file)


def _train_in_environments(
    run_file: Path | None, overrides: list[str], dry_run: bool, resume: Path | None, overwrite: bool
) -> None:
    from forebay.config import load_config
    from forebay.environments import folder
    from forebay.environments.config import FragmentRunConfig
    from forebay.runs.config import to_toml

    if resume is not None:
        config = folder.saved_config(resume, overrides)
    else:
        assert run_file is not None
        config = load_config(FragmentRunConfig, run_file, overrides)
    if dry_run:
        typer.echo(to_toml(config), nl=False)
        return
    from forebay.environments.launch import launch

    if asyncio.run(launch(config, resume=resume, overwrite=overwrite)):
        sys.exit(INTERRUPTED)


def _evaluate(folder: Path, overrides: list[str], model: Path | None) -> None:
    if _is_in_environments(folder / "run.toml"):
        from forebay.environments.folder import saved_config as saved_recipe
        from forebay.environments.launch import evaluate as play

        if model is not None:
            raise ConfigError("--model is for runs that train language models; leave it out")
        for name, value in asyncio.run(play(saved_recipe(folder, overrides))).items():
            typer.echo(f"{name} {value:g}")
        return
    from forebay.runs.folder import saved_config
    from forebay.runs.launch import launch_evaluation

    config = saved_config(folder, overrides)
    asyncio.run(launch_evaluation(config, model))
