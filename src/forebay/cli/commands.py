"""The ``forebay`` command.

::

    forebay train RUN.toml [key=value ...] [--dry-run] [--overwrite]
    forebay train RUN.toml [key=value ...] --check        one sample of everything, nothing trained
    forebay train --resume RUN_FOLDER [key=value ...] [--without-groups]
    forebay warmup RUN.toml [key=value ...]               the supervised phase of a run alone
    forebay eval  RUN_FOLDER [key=value ...]
    forebay replay RUN_FOLDER [--until STEP]
    forebay plan RUN.toml [key=value ...] [--gpus H100-80GB]
    forebay simulate RUN.toml [key=value ...] --cluster CLUSTER.toml [--sweep key=a,b]
    forebay buffer inspect|show|query|export|migrate|serve ...
    forebay scale RUN_FOLDER engines=+2                   engines join a run that works, or leave it
    forebay ledger RUN_FOLDER
    forebay card  RUN_FOLDER                              the trained model and what is known of it
    forebay push  RUN_FOLDER [OWNER/NAME] [--public]      the same, to the hub
    forebay board [RUN ...] [--port 7331] [--export report.html]
    forebay keys [PATTERN]
    forebay init [NAME] [FOLDER]

Errors a person can mend are one message and exit status 2; an interrupted run exits with 130.
"""

import asyncio
import contextlib
import gc
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from forebay import __version__
from forebay.cli import buffer as buffer_cli
from forebay.cli import card, keys, ledger
from forebay.cli import init as init_cli
from forebay.cli import replay as replay_cli
from forebay.cli import simulate as simulate_cli
from forebay.cli.errors import MARKUP, Overrides, one_message, say
from forebay.config import ConfigError, load_config, read_toml
from forebay.runs.config import RunConfig, load_ranks, to_toml
from forebay.runs.folder import RUN_FILE, list_checkpoints, saved_as
from forebay.tracebacks import INTERRUPTED, left_by_ctrl_c
from forebay.train import presets
from forebay.train.parallel.place import find_place

if TYPE_CHECKING:
    from forebay.environments.config import FragmentRunConfig

app = typer.Typer(
    help="Reinforcement learning for language models: rollouts, replay and training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=MARKUP,
)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False) -> None:
    if version:
        typer.echo(f"forebay {__version__}")
        raise typer.Exit


Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an earlier run in the run's folder.")]
WithoutGroups = Annotated[bool, typer.Option("--without-groups", help="Go on after the loss of the database alone.")]


@app.command()
def train(
    run_file: Annotated[
        Path | None, typer.Argument(help="A TOML run file; see recipes/. Left out with --resume.")
    ] = None,
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved run file and its plan only.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Try data, model, engine and judge on one sample; train nothing.")
    ] = False,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with the run in this folder, from its last checkpoint.")
    ] = None,
    overwrite: Overwrite = False,
    without_groups: WithoutGroups = False,
) -> None:
    """Train a model as a run file says, or go on with an interrupted run."""
    if resume is not None and run_file is not None:
        # With --resume the first positional argument is an override, not a file.
        overrides, run_file = [str(run_file), *(overrides or [])], None
    with one_message(), contextlib.ExitStack() as stack:
        if (place := find_place()) is not None:
            # Late: it loads torch.
            from forebay.train.parallel.launched import joined

            stack.enter_context(joined(place))
        if check:
            _check(run_file, overrides or [])
        else:
            _train(run_file, overrides or [], dry_run, resume, overwrite=overwrite, without_groups=without_groups)


@app.command()
def warmup(
    run_file: Annotated[Path, typer.Argument(help="A TOML run file with a [warmup] table.")],
    overrides: Overrides = None,
    overwrite: Overwrite = False,
) -> None:
    """Do the supervised phase of a run alone, and try its held-out prompts; train --resume goes on."""
    with one_message():
        if load_config(RunConfig, run_file, overrides or []).warmup is None:
            raise ConfigError(f"{run_file} has no [warmup]: add one, with steps")
        # As a run of no train steps, which --resume can go on from.
        _train(run_file, [*(overrides or []), "steps=0"], False, None, overwrite=overwrite)


@app.command(name="eval")
def evaluate(
    folder: Annotated[Path, typer.Argument(help="The folder of a run.")],
    overrides: Overrides = None,
    model: Annotated[Path | None, typer.Option(help="A model folder to try instead of the run's newest.")] = None,
) -> None:
    """Try a trained model on the held-out prompts of its run, and print the metrics."""
    with one_message():
        config = saved_as(_kind_of(folder / RUN_FILE), folder, overrides or [])
        newest = list_checkpoints(folder)[-1:]
        try:
            if isinstance(config, RunConfig):
                from forebay.runs.launch import launch_evaluation

                asyncio.run(launch_evaluation(config, model))
                return
            from forebay.environments.run import evaluate as play

            if model is not None:
                raise ConfigError("--model is for runs that train language models; leave it out")
            for name, value in asyncio.run(play(config)).items():
                typer.echo(f"{name} {value:g}")
        except Exception as error:
            if model is not None or all(path.exists() for path in newest):
                raise
            raise ConfigError(f"{newest[0]} was deleted meanwhile, by the run at work: try again") from error


@app.command()
def scale(
    folder: Annotated[Path, typer.Argument(help="The folder of a run that works, on this machine.")],
    change: Annotated[str, typer.Argument(help="engines=+2, -1, =4, +URL or -URL; on Ray also workers=+2")],
) -> None:
    """Have engines, on Ray workers too, join a run that works, or leave it; no rollout is lost."""
    with one_message():
        from forebay.runs.show.surroundings import ask_to_scale

        typer.echo(ask_to_scale(folder, change))


@app.command()
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
        # Before torch is loaded, which takes seconds.
        config = load_config(RunConfig, run_file, overrides or [])
        from forebay.plan import make_plan, parse_devices, this_machine
        from forebay.plan.report import show_plan

        device = this_machine(config.device) if gpus is None else parse_devices(gpus, network=network)
        found = make_plan(config, device, prompt_tokens=prompt_tokens)
        show_plan(found, Console(width=None if sys.stdout.isatty() else 100))
        if not found.fits:
            raise typer.Exit(1)


@app.command()
def board(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUN]...", help="Run folders, or folders with runs below; left out: this one."),
    ] = None,
    host: Annotated[
        str, typer.Option(help="The address to serve on; away from loopback a token is asked for.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; the next free one if it is taken.")] = 7331,
    beside: Annotated[bool, typer.Option(hidden=True, help="End when standard input does.")] = False,
    export: Annotated[
        Path | None,
        typer.Option(
            help="Instead of serving, write one self-contained file: NAME.html, or NAME.json, the timeline "
            "of a run for https://ui.perfetto.dev."
        ),
    ] = None,
) -> None:
    """Show runs in a browser: numbers, rollouts, what flows where, what was dropped."""
    with one_message():
        from forebay.board.server import Board, serve
        from forebay.runs.record.history import read_spans
        from forebay.watching.trace import write_trace

        named = folders or [Path()]
        for folder in named:
            if not folder.is_dir():
                raise ConfigError(f"there is no folder {str(folder)!r}; name a run's, for example runs/NAME")
        shown = Board([folder.resolve() for folder in named])
        # Where none is named, the page may be opened before the first run is there.
        if not shown.runs() and folders:
            raise ConfigError(f"there is no run at or below {', '.join(map(repr, map(str, named)))}")
        if export is not None and export.suffix == ".json":
            # A timeline is of one run.
            write_trace(export, read_spans(named[0]))
            typer.echo(f"written: {export}")
            return
        if export is not None:
            from forebay.board.export import write_report

            typer.echo(f"written: {write_report(shown, export)}")
            return
        serve(shown, host=host, port=port, say=typer.echo, ends=sys.stdin if beside else None)


app.add_typer(buffer_cli.app, name="buffer")
app.command(name="ledger")(ledger.show_ledger)
app.command(name="card")(card.card)
app.command(name="push")(card.push)
app.command(name="simulate")(simulate_cli.simulate_run)
app.command(name="replay")(replay_cli.replay)
app.command(name="keys")(keys.show_keys)
app.command(name="init")(init_cli.init)


def _train(run_file: Path | None, overrides: list[str], dry_run: bool, resume: Path | None, **how: bool) -> None:
    """Begin or go on; `how` are ``overwrite`` and ``without_groups``, as of `launch`."""
    if resume is not None and how.get("overwrite"):
        raise ConfigError("--resume goes on with a run, and --overwrite replaces one: leave one of the two out")
    if resume is not None:
        config = _load(resume / RUN_FILE, overrides, resume)
    elif run_file is not None:
        config = _load(run_file, overrides)
    else:
        raise ConfigError("name a run file, for example recipes/demo_tiny.toml, or --resume RUN_FOLDER")
    if how.get("without_groups") and (resume is None or not isinstance(config, RunConfig)):
        raise ConfigError("--without-groups is for --resume of a run that trains a language model: leave it out")
    if dry_run:
        typer.echo(to_toml(config), nl=False)
        if isinstance(config, RunConfig):
            for origin in presets.origins(config.train):
                typer.echo(f"# {origin}")
            for difference in presets.differences(config.train):
                typer.echo(f"warning: {difference}", err=True)
            # On stderr, so that the run file alone is on stdout.
            _show_plan_here(config, Console(stderr=True))
        return
    if isinstance(config, RunConfig):
        # Until the loop begins: what is loaded and read lasts, and looking at it took a tenth of the time.
        gc.set_threshold(1_000_000, 20, 20)
        with left_by_ctrl_c():
            load_ranks(config)
            # Late: they load torch and transformers, which most commands do without.
            from forebay.plan.estimate import fit_memory
            from forebay.runs.launch import launch

            config, warning = fit_memory(config)
        if warning is not None:
            say(f"warning: {warning}")
        last_line, interrupted = asyncio.run(launch(config, resume=resume, **how))
        if last_line:
            typer.echo(last_line)
    else:
        from forebay.environments.run import launch as launch_in_environments

        interrupted = asyncio.run(launch_in_environments(config, resume=resume, overwrite=how["overwrite"]))
    if interrupted:
        sys.exit(INTERRUPTED)


def _show_plan_here(config: RunConfig, console: Console) -> None:
    """Print the plan of `config` on this machine, or in one line why there is none."""
    from forebay.plan import make_plan, this_machine
    from forebay.plan.estimate import NO_PLAN
    from forebay.plan.report import show_plan

    try:
        show_plan(make_plan(config, this_machine(config.device)), console)
    except NO_PLAN as error:
        console.print(f"no plan of the memory: {error}", markup=False, highlight=False)


def _check(run_file: Path | None, overrides: list[str]) -> None:
    if run_file is None:
        raise ConfigError("--check is for a run file: forebay train RUN.toml --check")
    config = _load(run_file, overrides)
    if isinstance(config, RunConfig):
        from forebay.runs.launch import try_all

        asyncio.run(try_all(config, typer.echo))
    else:
        from forebay.environments.run import try_parts

        try_parts(config, typer.echo)
    command = shlex.join(["forebay", "train", str(run_file), *overrides])
    typer.echo(f"all of it works; nothing was trained or kept. To start: {command}")


def _load(file: Path, overrides: list[str], resume: Path | None = None) -> "RunConfig | FragmentRunConfig":
    """The config in `file`, which may be that of the run in the folder `resume`.

    Raises:
        ConfigError: it does not fit, or torchrun or srun has started another number of processes.
    """
    kind, place = _kind_of(file), find_place()
    if place is not None and "ranks" not in read_toml(file).get("train", {}):
        overrides = [f"train.ranks={place.size}", *overrides]
    config = load_config(kind, file, overrides) if resume is None else saved_as(kind, resume, overrides)
    if place is not None and (ranks := getattr(config.train, "ranks", 1)) != place.size:
        raise ConfigError(
            f"train.ranks = {ranks}, but {place.size} processes were started: start {ranks}, or leave train.ranks out"
        )
    return config


def _kind_of(run_file: Path) -> "type[RunConfig | FragmentRunConfig]":
    """The model of the run file: one with an ``[environment]`` table has a recipe of its own."""
    # A missing file gets its message when it is read.
    if run_file.is_file() and "environment" in read_toml(run_file):
        from forebay.environments.config import FragmentRunConfig

        return FragmentRunConfig
    return RunConfig
