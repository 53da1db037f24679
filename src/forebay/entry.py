"""A run from Python: ``forebay.run(config, judge=..., data=...)``, in a script or a notebook.

::

    dict, file or RunConfig --judge, data by name (forebay.given)--> RunConfig --launch--> RunResult
    run: in the calling thread; in a running event loop (a notebook's): in a thread with a loop of its own
    run_async: in the running event loop

It is what ``forebay train`` does, with objects in place of names; the display, the run folder and the errors
are the same.
"""

import asyncio
import functools
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ParamSpec

from forebay import given
from forebay.config import ConfigError, apply_overrides, parse_config, read_toml
from forebay.metrics import read_jsonl
from forebay.runs.config import RunConfig, load_ranks
from forebay.runs.folder import RUN_FILE

logger = logging.getLogger(__name__)

JudgeFunction = Callable[..., Any]
Rows = Sequence[Mapping[str, Any]]
P = ParamSpec("P")


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The results of a run."""

    folder: Path
    """The run folder; ``forebay eval`` and ``forebay.run(resume=...)`` take it."""
    model: Path | None
    """The trained model, a Hugging Face folder; None if the run was stopped before its end."""
    metrics: Sequence[Mapping[str, Any]] = field(repr=False)
    """The rows of ``metrics.jsonl``, one for each train step, and those of evaluations."""
    summary: str | None
    """Accuracy on the held-out prompts before and after; None without such prompts."""
    interrupted: bool
    """Whether Ctrl-C or SIGTERM ended it early; it can be resumed."""


async def run_async(
    config: Mapping[str, Any] | Path | str | RunConfig | None = None,
    *overrides: str,
    judge: JudgeFunction | Mapping[str, JudgeFunction] | None = None,
    data: Rows | Mapping[str, Rows] | None = None,
    eval_data: Rows | Mapping[str, Rows] | None = None,
    resume: Path | str | None = None,
    overwrite: bool = False,
    without_groups: bool = False,
) -> RunResult:
    """Train a model, or go on with the run in the folder `resume`; the result is there when it is done.

    ``await forebay.run_async(...)`` works in the running event loop. ``forebay.run(...)`` blocks; in a
    notebook, whose event loop runs already, it works in a thread with an event loop of its own; a keyboard
    interrupt then cancels it, and the last checkpoint remains.

    ::

        result = forebay.run(
            "run.toml",
            "train.lr=1e-3",
            judge=lambda state: float(state.response == "46"),
            data=[{"prompt": "12+34=", "answer": "46"}],
        )

    Args:
        config: a run file's tables, its path, or a `RunConfig`; None only with `resume`. Without ``tasks`` it
            gets one, called ``task``.
        overrides: as ``forebay train`` takes them.
        judge: a plain or async function of a rollout; of several tasks, a mapping from task to function.
        data: rows as a data file has them; of several tasks, a mapping from task to rows.
        eval_data: held-out rows, given as `data` is.
        resume: folder of an earlier run; what was given to it as objects is given again.
        overwrite: replace an earlier run in the run's folder.
        without_groups: resume after the loss of the database alone; its live groups are generated again.

    Raises:
        ConfigError: something does not fit.
        ProductionError, StallError, FloatingPointError, PartLost, DiskError: as `forebay.runs.launch.launch`.
    """
    if resume is not None and overwrite:
        raise ConfigError("resume goes on with a run, and overwrite replaces one: leave one of the two out")
    if resume is None and without_groups:
        raise ConfigError("without_groups is for resume: leave it out")
    # The folder may have been moved.
    folder = None if resume is None else await asyncio.to_thread(Path(resume).resolve)
    tables, beside = _tables(config, folder)
    objects: dict[str, Any] = {}
    for kind, value in (("judge", judge), ("data", data), ("eval_data", eval_data)):
        if value is not None:
            _put(kind, value, tables, objects)
    with given.during(objects):
        read = parse_config(
            RunConfig, apply_overrides(tables, overrides), source=str(beside or "config"), beside=beside
        )
        if objects and read.cluster is not None:
            raise ConfigError(
                "a judge or rows given as Python objects stay in this process, and a cluster runs judges in "
                "others; name them as 'package.module:Name', or leave cluster out"
            )
        if folder is not None:
            read = read.model_copy(update={"output": folder.parent, "name": folder.name})
        load_ranks(read)
        from forebay.plan.estimate import fit_memory
        from forebay.runs.launch import launch

        read, warning = await asyncio.to_thread(fit_memory, read)
        if warning is not None:
            logger.warning("%s", warning)
        summary, interrupted = await launch(read, resume=folder, overwrite=overwrite, without_groups=without_groups)
    model = read.folder / "model"
    return RunResult(
        folder=read.folder,
        model=model if model.is_dir() else None,
        metrics=read_jsonl(read.folder / "metrics.jsonl"),
        summary=summary,
        interrupted=interrupted,
    )


def _blocking(function: Callable[P, Coroutine[Any, Any, RunResult]]) -> Callable[P, RunResult]:
    """`function` for callers outside of the event loop that does the work."""

    @functools.wraps(function, assigned=("__module__", "__doc__"))
    def run(*args: P.args, **keywords: P.kwargs) -> RunResult:
        work = function(*args, **keywords)
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(work)
        return _in_a_thread(work)

    return run


def _in_a_thread(work: Coroutine[Any, Any, RunResult]) -> RunResult:
    loop = asyncio.new_event_loop()
    # Made in this thread: an interrupt comes here, and cancels it.
    task = loop.create_task(work)

    def target() -> RunResult:
        # Closes the loop with all that belongs to it.
        with asyncio.Runner(loop_factory=lambda: loop):
            return loop.run_until_complete(task)

    # At the end of the block the run has ended, also where it was cancelled.
    with ThreadPoolExecutor(1, "forebay-run") as pool:
        try:
            return pool.submit(target).result()
        except KeyboardInterrupt:
            loop.call_soon_threadsafe(task.cancel)
            raise


run = _blocking(run_async)


def _tables(
    config: Mapping[str, Any] | Path | str | RunConfig | None, resume: Path | None
) -> tuple[dict[str, Any], Path | None]:
    """The run file's tables, and the folder that what they name is looked for in."""
    if (config is None) == (resume is None):
        raise ConfigError("give either config or resume, the folder of an earlier run")
    if isinstance(config, RunConfig):
        # Only what was set: the rest may follow from other keys, which overrides may change.
        return config.model_dump(mode="json", exclude_unset=True), None
    if isinstance(config, Mapping):
        return apply_overrides(config, ()), None
    path = Path(config) if config is not None else Path(resume or ".") / RUN_FILE
    return read_toml(path), path.parent


def _put(kind: str, value: Any, tables: dict[str, Any], objects: dict[str, Any]) -> None:
    """Have the tasks in `tables` name what they are given, under names that `objects` gets."""
    tasks = tables.setdefault("tasks", [{"name": "task"}])
    by_task = value if isinstance(value, Mapping) else {task.get("name"): value for task in tasks}
    if not isinstance(value, Mapping) and len(tasks) > 1:
        raise ConfigError(f"there are {len(tasks)} tasks: give {kind} as {{task name: {kind}}}")
    names = [task.get("name") for task in tasks]
    for name, item in by_task.items():
        if name not in names:
            raise ConfigError(f"{kind} is for task {name!r}, but the tasks are {', '.join(map(str, names))}")
        number = names.index(name)
        word = f"{kind}_{number}"
        table = tasks[number].get(kind)
        kept = dict(table) if isinstance(table, Mapping) else {}
        if kind == "judge":
            objects[word] = item
            tasks[number][kind] = {**kept, "name": f"{given.__name__}:{word}"}
        else:
            if not isinstance(item, Iterable):
                raise ConfigError(f"{kind} must be rows, as a list of mappings, got {type(item).__name__}")
            rows = list(item)
            objects[word] = functools.partial(list, rows)
            if not any(isinstance(row, Mapping) and "answer" in row for row in rows):
                # A judge of one's own may need none.
                kept["columns"] = {"answer": "", **kept.get("columns", {})}
            tasks[number][kind] = {**kept, "source": f"{given.__name__}:{word}"}
