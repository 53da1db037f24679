"""Writing and reading checkpoint folders: safetensors and JSON only, whole or not at all.

::

    replace_folder(path): path.saving/ (files written) -> fsync -> old path aside -> rename -> old one deleted

    TrainerParts --save_trainer--> model/ (Hugging Face, adapters merged)   adapter/ (LoRA only, peft format)
                                   optimiser, critic, critic_optimiser, random .safetensors   trainer.json

A crash at any point leaves either the old folder or the new one under `path`, or, in the instant between two
renames, the old one as ``path.replaced``.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from forebay.durable import sync, sync_tree
from forebay.train.critic import Critic
from forebay.train.lora import is_lora, merged_copy, without_adapters
from forebay.train.optimisation import Optimiser

FORMAT = 1
"""Version of the checkpoint folder."""


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
    """Write tensors as a safetensors file; each gets its own memory there."""
    save_file({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}, path)


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """What `save_tensors` wrote, on the CPU."""
    tensors: dict[str, torch.Tensor] = load_file(path)
    return tensors


def save_json(values: Mapping[str, Any], path: Path) -> None:
    """Write a JSON object."""
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def load_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ValueError: there is no such file.
    """
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"no checkpoint at {str(path.parent)!r}: {path.name} is missing") from None
    return values


def random_state() -> dict[str, torch.Tensor]:
    """The state of torch's global generators: CPU, and each CUDA device if there is one."""
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"cpu": torch.get_rng_state(), **{f"cuda:{i}": state for i, state in enumerate(devices)}}


def set_random_state(states: Mapping[str, torch.Tensor]) -> None:
    """Take over what `random_state` gave; states of devices that are not here are left out."""
    torch.set_rng_state(states["cpu"])
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for number in range(count):
        if f"cuda:{number}" in states:
            torch.cuda.set_rng_state(states[f"cuda:{number}"], number)


@dataclass(frozen=True, kw_only=True)
class TrainerParts:
    """Everything of a trainer that changes with training, and the model that it began with."""

    model: nn.Module
    optimiser: Optimiser
    critic: Critic | None
    critic_optimiser: Optimiser | None
    ref_model: nn.Module | None

    def kind(self) -> dict[str, Any]:
        """What must be equal in the trainer that saves and the one that resumes."""
        return {
            "format": FORMAT,
            "adapters": is_lora(self.model),
            "critic": self.critic is not None,
            "starting_weights": self._starting_weights(),
        }

    def _starting_weights(self) -> str | None:
        """A fingerprint of the frozen weights that are not saved: below adapters, or the reference model."""
        frozen = without_adapters(self.model) if is_lora(self.model) else self.ref_model
        if frozen is None:
            return None
        digest = hashlib.sha256()
        for name, parameter in frozen.named_parameters():
            if ".lora_" not in name:
                # A sample of each tensor is enough to tell two models apart, and takes no time.
                sample = parameter.detach().flatten()[:256].float().cpu().numpy()
                digest.update(name.encode() + sample.tobytes())
        return digest.hexdigest()


def save_trainer(folder: Path, parts: TrainerParts, *, train_step: int, tokenizer: Any = None) -> None:
    """Write a trainer into an empty folder."""
    merged: Any = merged_copy(parts.model)
    with _no_progress_bars():
        merged.save_pretrained(folder / "model")
    if tokenizer is not None:
        tokenizer.save_pretrained(folder / "model")
    if is_lora(parts.model):
        adapted: Any = parts.model
        adapted.save_pretrained(folder / "adapter", save_embedding_layers=False)
    save_tensors(parts.optimiser.state_tensors(), folder / "optimiser.safetensors")
    if parts.critic is not None and parts.critic_optimiser is not None:
        save_tensors(parts.critic.state_dict(), folder / "critic.safetensors")
        save_tensors(parts.critic_optimiser.state_tensors(), folder / "critic_optimiser.safetensors")
    save_tensors(random_state(), folder / "random.safetensors")
    save_json({**parts.kind(), "train_step": train_step}, folder / "trainer.json")


def load_trainer(folder: Path, parts: TrainerParts) -> int:
    """Read into `parts` what `save_trainer` wrote; return the number of completed train steps.

    Raises:
        ValueError: there is no checkpoint, or it is of another kind of trainer.
    """
    saved = load_json(folder / "trainer.json")
    for name, mine in parts.kind().items():
        if saved.get(name) != mine:
            raise ValueError(
                f"the checkpoint {str(folder)!r} has {name} = {saved.get(name)!r}, this trainer {mine!r}; "
                f"build it from the same config and the same starting model (after its warm-up, if any)"
            )
    _load_weights(parts.model, folder)
    parts.optimiser.load_state_tensors(load_tensors(folder / "optimiser.safetensors"))
    if parts.critic is not None and parts.critic_optimiser is not None:
        parts.critic.load_state_dict(load_tensors(folder / "critic.safetensors"))
        parts.critic_optimiser.load_state_tensors(load_tensors(folder / "critic_optimiser.safetensors"))
    set_random_state(load_tensors(folder / "random.safetensors"))
    return int(saved["train_step"])


def _load_weights(model: Any, folder: Path) -> None:
    if is_lora(model):
        from peft import set_peft_model_state_dict

        set_peft_model_state_dict(model, load_tensors(folder / "adapter" / "adapter_model.safetensors"))
        return
    # Through the model's class: names on disk may differ from those in memory.
    dtype = next(model.parameters()).dtype
    with _no_progress_bars():
        saved = type(model).from_pretrained(folder / "model", dtype=dtype)
    model.load_state_dict(saved.state_dict())


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
