"""Writing and reading checkpoint folders: safetensors and JSON only, whole or not at all.

::

    replace_folder(path): path.saving/ (files written) -> checksums -> fsync -> old path aside -> rename
                          -> old one deleted

    TrainerParts --save_trainer--> model/ (Hugging Face, adapters merged)   adapter/ (LoRA only, peft format)
                                   optimizer, critic, critic_optimizer .safetensors   trainer.json
    (of sharded weights the whole tensors, so that the folder says nothing of how many ranks wrote it)
    save_random --> random.safetensors

A crash at any point leaves either the old folder or the new one under `path`, or, in the instant between two
renames, the old one as ``path.replaced``.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from forebay.io.durable import check, seal, sync, sync_tree
from forebay.train.model.critic import Critic
from forebay.train.model.lora import adapter_config, adapter_weights, is_lora, model_weights, without_adapters
from forebay.train.optimization import Optimizer
from forebay.train.parallel.sharding import fill, plain_class, whole

FORMAT = 1
"""Version of the checkpoint folder."""
RANDOM_FILE = "random.safetensors"
ADAPTER_FILE = "adapter_model.safetensors"
"""The name that peft looks for."""


@contextmanager
def replace_folder(path: Path) -> Iterator[Path]:
    """Give an empty folder to write to, and make it `path` once the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new, old = path.with_name(path.name + ".saving"), path.with_name(path.name + ".replaced")
    for leftover in (new, old):
        shutil.rmtree(leftover, ignore_errors=True)
    new.mkdir()
    try:
        yield new
        seal(new)
        sync_tree(new)
        if path.exists():
            path.rename(old)
        new.rename(path)
        sync(path.parent)
    finally:
        shutil.rmtree(new, ignore_errors=True)
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)


def save_tensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write tensors on the CPU, which share no memory, as a safetensors file.

    Raises:
        OSError: the disk takes no more.
    """
    with _disk_errors_of_safetensors(path):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


@contextmanager
def _disk_errors_of_safetensors(path: Path) -> Iterator[None]:
    """An `OSError`, as of any other file, where safetensors has only a text: "... (os error 28)"."""
    try:
        yield
    except SafetensorError as error:
        found = re.search(r"\(os error (\d+)\)", str(error))
        if found is None:
            raise
        number = int(found[1])
        raise OSError(number, os.strerror(number), str(path)) from error


def save_json(values: Mapping[str, Any], path: Path) -> None:
    """Write a JSON object."""
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def check_folder(folder: Path) -> None:
    """Read every file that `replace_folder` published at `folder` and hold it against its checksum.

    Raises:
        ValueError: there is no checkpoint, or one of its files is damaged.
    """
    if not (folder / "trainer.json").exists():
        raise ValueError(f"no checkpoint at {str(folder)!r}: trainer.json is missing")
    check(folder)


def save_random(folder: Path) -> None:
    """Write the state of torch's global generators: CPU, and each CUDA device if there is one."""
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    states = {"cpu": torch.get_rng_state(), **{f"cuda:{i}": state for i, state in enumerate(devices)}}
    save_tensors(states, folder / RANDOM_FILE)


def load_random(folder: Path) -> None:
    """Take over what `save_random` wrote; states of devices that are not here are left out."""
    states = load_file(folder / RANDOM_FILE)
    torch.set_rng_state(states["cpu"])
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for number in range(count):
        if f"cuda:{number}" in states:
            torch.cuda.set_rng_state(states[f"cuda:{number}"], number)


@dataclass(frozen=True, kw_only=True)
class TrainerParts:
    """Everything of a trainer that changes with training, and the model that it began with."""

    model: nn.Module
    optimizer: Optimizer
    critic: Critic | None
    critic_optimizer: Optimizer | None
    starting_weights: str | None
    """`fingerprint` of the frozen weights that are not saved: below adapters, or the reference model."""

    def kind(self) -> dict[str, Any]:
        """The facts that must be equal in the trainer that saves and the one that resumes."""
        return {
            "format": FORMAT,
            "adapters": is_lora(self.model),
            "critic": self.critic is not None,
            "starting_weights": self.starting_weights,
        }


def fingerprint(model: nn.Module) -> str:
    """Tells the weights of a model that is not sharded (yet) from others; adapters do not count."""
    digest = hashlib.sha256()
    for name, parameter in without_adapters(model).named_parameters():
        if ".lora_" not in name:
            # A sample of each tensor is enough to tell two models apart, and takes no time.
            sample = parameter.detach().flatten()[:256].float().cpu().numpy()
            digest.update(name.encode() + sample.tobytes())
    return digest.hexdigest()


def save_trainer(folder: Path, parts: TrainerParts, *, train_step: int, writes: bool = True) -> None:
    """Write a trainer into an empty folder.

    Where the weights are sharded, every rank calls this, and all but one with `writes` False: they give
    their slices and keep nothing.
    """
    weights = _on_cpu(model_weights(parts.model), writes)
    if writes:
        base: Any = without_adapters(parts.model)
        saved_names = base.state_dict().keys()
        buffers = {name: buffer for name, buffer in base.named_buffers() if name in saved_names}
        with _no_progress_bars(), _disk_errors_of_safetensors(folder / "model"):
            base.save_pretrained(folder / "model", state_dict=weights | buffers)
    # The optimizer's tensors are gathered next: both at once would take twice the memory.
    del weights
    rest = {"optimizer": parts.optimizer.state_tensors()}
    if parts.critic is not None and parts.critic_optimizer is not None:
        rest["critic"] = iter(parts.critic.state_dict().items())
        rest["critic_optimizer"] = parts.critic_optimizer.state_tensors()
    files = {f"{name}.safetensors": tensors for name, tensors in rest.items()}
    if is_lora(parts.model):
        files[f"adapter/{ADAPTER_FILE}"] = adapter_weights(parts.model)
    for name, tensors in files.items():
        # One file's tensors after the other's: they are gathered whole.
        gathered = _on_cpu(tensors, writes)
        if writes:
            (folder / name).parent.mkdir(exist_ok=True)
            save_tensors(gathered, folder / name)
    if writes:
        if is_lora(parts.model):
            save_json(adapter_config(parts.model), folder / "adapter" / "adapter_config.json")
        dtype = str(next(parts.model.parameters()).dtype).removeprefix("torch.")
        save_json({**parts.kind(), "train_step": train_step, "dtype": dtype}, folder / "trainer.json")


def _on_cpu(tensors: Iterable[tuple[str, torch.Tensor]], keep: bool) -> dict[str, torch.Tensor]:
    """Copies of the tensors, whole; or nothing, but to be gathered they are gone through in both cases."""
    kept = {}
    for name, tensor in tensors:
        full = whole(tensor.detach())
        if keep:
            kept[name] = full.to("cpu", copy=True)
    return kept


def load_trainer(folder: Path, parts: TrainerParts) -> int:
    """Read into `parts` what `save_trainer` wrote; return the number of completed train steps.

    Raises:
        ValueError: it is of another kind of trainer.
    """
    saved = json.loads((folder / "trainer.json").read_text(encoding="utf-8"))
    for name, mine in parts.kind().items():
        if saved.get(name) != mine:
            raise ValueError(
                f"the checkpoint {str(folder)!r} has {name} = {saved.get(name)!r}, this trainer {mine!r}; "
                f"build it from the same config and the same starting model (after its warm-up, if any)"
            )
    if is_lora(parts.model):
        _fill_all(dict(adapter_weights(parts.model)), load_file(folder / "adapter" / ADAPTER_FILE))
    else:
        # Through the model's class: names on disk may differ from those in memory.
        loader: Any = plain_class(parts.model)
        dtype = next(parts.model.parameters()).dtype
        with _no_progress_bars():
            model = loader.from_pretrained(folder / "model", dtype=dtype)
        _fill_all(parts.model.state_dict(), model.state_dict())
    if parts.critic is not None:
        _fill_all(parts.critic.state_dict(), load_file(folder / "critic.safetensors"))
    for name, optimizer in (("optimizer", parts.optimizer), ("critic_optimizer", parts.critic_optimizer)):
        if optimizer is not None:
            path = folder / f"{name}.safetensors"
            # Version 0.1 spelled the name otherwise.
            old = folder / f"{name.replace('optimizer', 'optimiser')}.safetensors"
            optimizer.load_state_tensors(load_file(path if path.exists() else old))
    return int(saved["train_step"])


def _fill_all(targets: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
    if different := sorted(set(targets) ^ set(tensors)):
        raise ValueError(f"the saved weights are of another model; names that differ: {different[:5]}")
    for name, target in targets.items():
        fill(target, tensors[name])


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing into the caller's terminal."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
