"""The ``forebay card`` and ``forebay push`` commands: a trained model, and a card of what is known of it.

::

    RUN_FOLDER/model, the newest checkpoint's adapter --copy--> FOLDER/
    run.toml, metrics.jsonl, ledger.jsonl --> FOLDER/README.md
    push: FOLDER --huggingface_hub--> owner/name; where the hub cannot be reached, FOLDER stays
"""

import io
import shutil
from pathlib import Path
from typing import Annotated

import tomli_w
import typer
from rich.console import Console
from rich.table import Table

from forebay import __version__
from forebay.cli.errors import one_message
from forebay.cli.ledger import LEDGER_FILE, balance_table, bias_table
from forebay.config import ConfigError
from forebay.ledger import Ledger, compare_dropped
from forebay.metrics import EVAL_SCORE, read_jsonl
from forebay.runs.config import RunConfig, to_toml
from forebay.runs.folder import list_checkpoints, saved_config

CARD_FOLDER = "card"

RunFolder = Annotated[Path, typer.Argument(metavar="RUN_FOLDER", help="The folder of a run.")]


def card(folder: RunFolder) -> None:
    """Write the trained model of a run, and a card made from the run, into its folder card/."""
    with one_message():
        typer.echo(f"written: {write_card(folder)}")


def push(
    folder: RunFolder,
    repository: Annotated[
        str | None, typer.Argument(metavar="[OWNER/NAME]", help="None: the run's name, of your account.")
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="Let everybody see a new repository.")] = False,
) -> None:
    """Push the trained model of a run, and a card made from the run, to the hub."""
    with one_message():
        written = write_card(folder)
        from huggingface_hub import HfApi, constants
        from huggingface_hub.errors import HFValidationError, HTTPError  # type: ignore[attr-defined]

        name = repository or folder.resolve().name
        try:
            if constants.HF_HUB_OFFLINE:
                raise ConnectionError("HF_HUB_OFFLINE is set")
            place = HfApi().create_repo(name, private=not public, exist_ok=True)
            HfApi().upload_folder(repo_id=place.repo_id, folder_path=written)
        except HFValidationError as error:
            raise ConfigError(f"not pushed: {error}. Name it: forebay push {folder} OWNER/NAME") from None
        # The first is that of the library's HTTP client, whose lost connections are no OSError.
        except (HTTPError, OSError) as error:
            raise ConfigError(
                f"not pushed: {error}. The folder is written; where the hub can be reached and you are "
                f"logged in (hf auth login), run: hf upload {name} {written}"
            ) from None
        typer.echo(f"pushed: {place}")


def write_card(run: Path) -> Path:
    """The folder that was written: the model of the run in the folder `run`, its adapter and its card.

    Raises:
        ConfigError: it is no run that trains a language model, or it has no model yet.
    """
    config, target = saved_config(run), run / CARD_FOLDER
    if not (run / "model").is_dir():
        raise ConfigError(f"no trained model in {str(run)!r}: it is there once the run has ended")
    # A card of before: the run may have another model by now.
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(run / "model", target)
    for checkpoint in list_checkpoints(run)[-1:]:
        if (adapter := checkpoint / "trainer" / "adapter").is_dir():
            shutil.copytree(adapter, target / "adapter")
    (target / "README.md").write_text(_text(run, config), "utf-8")
    return target


def _text(run: Path, config: RunConfig) -> str:
    from forebay.runs.show.pictures import terminal_curve

    rows = read_jsonl(run / "metrics.jsonl")
    # Null where every rollout of the evaluation failed.
    tried = [row for row in rows if row.get(EVAL_SCORE) is not None]
    lines = [
        "---\nlibrary_name: transformers\ntags: [reinforcement-learning, forebay]\n---\n",
        f"# {config.name}\n\n`{config.model.source}`, trained by reinforcement learning for "
        f"{rows[-1]['train_step']} steps of {config.batch_size} prompts x {config.rollouts_per_prompt} "
        f"responses, with the advantage {config.train.advantage} and the loss {config.train.loss}, by "
        f"forebay {__version__}.\n\n## Data\n",
    ]
    for task in config.tasks:
        table = task.data.model_dump(mode="json", exclude_defaults=True) if task.data else {}
        data = tomli_w.dumps(table).strip()
        lines += [f"Task `{task.name}`, judge `{task.judge and task.judge.name}`:\n\n```toml\n{data}\n```\n"]
    if curve := terminal_curve(rows, rows, width=100, height=20, ascii_only=True):
        lines += [f"## Curve\n\nReward by train step (line), held-out score (o).\n\n```text\n{curve}\n```\n"]
    if tried:
        lines += ["## Evaluation\n\nOn held-out prompts.\n"]
        lines += [f"| | step {tried[0]['train_step']} | step {tried[-1]['train_step']} |\n|---|---|---|"]
        names = [name for name in tried[-1] if name.startswith("eval/")]
        names = [name for name in names if None not in (tried[0].get(name), tried[-1][name])]
        lines += [f"| {name} | {tried[0][name]:.4g} | {tried[-1][name]:.4g} |" for name in names]
    if (run / LEDGER_FILE).is_file():
        ledger = Ledger.read(run / LEDGER_FILE)
        lines += ["\n## Trained and dropped\n\nGroups of responses, by what became of them.\n"]
        lines += [_block(balance_table(ledger.balance(ledger.count_live())))]
        lines += ["By length, time and difficulty (the mean score of a group's first try):\n"]
        lines += [_block(bias_table(compare_dropped(ledger)))]
    # Places on this machine are of no use elsewhere.
    shown = config.model_copy(update={"search_path": None, "output": Path("runs")})
    return "\n".join([*lines, f"## Recipe\n\n```toml\n{to_toml(shown)}```\n"])


def _block(table: Table) -> str:
    out = io.StringIO()
    Console(file=out, width=160).print(table)
    text = "\n".join(line.rstrip() for line in out.getvalue().splitlines())
    return f"```text\n{text}\n```\n"
