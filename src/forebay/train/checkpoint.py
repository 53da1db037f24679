"""Writing and reading checkpoint folders: safetensors and JSON only, whole or not at all.

::

    TrainerParts --begin_save--> copies on the CPU --(a thread, while training goes on)--> files --> done
        state/    weights, critic, moments: each rank its slices (torch.distributed.checkpoint's safetensors)
        model/    the Hugging Face model, adapters merged: each rank some of the files   adapter/ (LoRA, peft)
        trainer.json
    load_trainer: each rank reads of state/ what its slices cover, whatever number of ranks wrote it
    save_random --> random.safetensors

The folder is published by `forebay.io.safe_files`: a crash at any point leaves the old one or the new one.
"""

import hashlib
import json
import os
import re
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint import _hf_utils as hf
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import DeviceMesh

from forebay.io.safe_files import check
from forebay.train.model.critic import Critic
from forebay.train.model.lora import adapter_config, adapter_weights, is_lora, model_weights, without_adapters
from forebay.train.optimization import Optimizer
from forebay.train.parallel.sharding import no_progress_bars, own_block, put_back, to_fill, whole

FORMAT = 2
"""Version of the checkpoint folder; 1, until version 0.2, had whole tensors only."""
STATE = "state"
RANDOM_FILE = "random.safetensors"
PENALTIES_FILE = "penalties.json"
ADAPTER_FILE = "adapter_model.safetensors"
"""The name that peft looks for."""


def save_tensors(tensors: Mapping[str, torch.Tensor], path: Path, **metadata: str) -> None:
    """Write tensors on the CPU as a safetensors file that is on the disk on return.

    They go to the file from where they lie, and other threads run meanwhile: the library's own writer holds
    the interpreter for as long as it writes.

    Raises:
        OSError: the disk takes no more.
    """
    header: dict[str, Any] = {"__metadata__": {hf.FORMAT_KEY: hf.FORMAT_VALUE, **metadata}}
    # The widest first, so that each begins where one of its dtype may.
    ordered = sorted(tensors.items(), key=lambda entry: -entry[1].element_size())
    start = 0
    for name, tensor in ordered:
        place = [start, start := start + tensor.nbytes]
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": place}
    text = json.dumps(header).encode()
    # So that the tensors begin at a multiple of 8 bytes.
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in ordered:
            file.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


_NAMES = {torch.bool: "BOOL"} | {dtype: name for name, dtype in hf.DTYPE_MAP.items()}
"""The names of dtypes in the header of a safetensors file."""


def save_json(values: Mapping[str, Any], path: Path) -> None:
    """Write a JSON object."""
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def check_folder(folder: Path) -> None:
    """Read every file that was published at `folder` and hold it against its checksum.

    Raises:
        ValueError: there is no checkpoint, or one of its files is damaged.
    """
    if not (folder / "trainer.json").exists():
        raise ValueError(f"no checkpoint at {str(folder)!r}: trainer.json is missing")
    check(folder)


def save_random(folder: Path) -> None:
    """Write the state of torch's global generators: CPU, and each CUDA device if there is one."""
    devices = {f"cuda:{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    save_tensors({"cpu": torch.get_rng_state(), **devices}, folder / RANDOM_FILE)


def load_random(folder: Path) -> None:
    """Take over what `save_random` wrote; states of devices that are not here are left out."""
    states = load_file(folder / RANDOM_FILE)
    torch.set_rng_state(states["cpu"])
    for number in range(torch.cuda.device_count()):
        if f"cuda:{number}" in states:
            torch.cuda.set_rng_state(states[f"cuda:{number}"], number)


# In threads, too: a trainer on one rank has no process group, and means it.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

MODEL_FILE_BYTES = 4 << 30
"""Most of a file of ``model/``, but for a single layer that is larger."""


@dataclass(frozen=True, kw_only=True)
class TrainerParts:
    """Everything of a trainer that changes with training, and the model that it began with."""

    model: nn.Module
    critic: Critic | None
    optimizers: Mapping[str, Optimizer]
    """The optimizers by the beginning of their names in a checkpoint: ``optimizer``, and that of a critic."""
    starting_weights: str | None
    """`fingerprint` of the frozen weights that are not saved: below adapters, or the reference model."""

    @property
    def dtype(self) -> str:
        """Torch's name of that of the weights in memory; with LoRA of those below the adapters."""
        return str(next(self.model.parameters()).dtype).removeprefix("torch.")

    def kind(self) -> dict[str, Any]:
        """The facts that must be equal in the trainer that saves and the one that resumes."""
        return {
            "format": FORMAT,
            "adapters": is_lora(self.model),
            "critic": self.critic is not None,
            "starting_weights": self.starting_weights,
        }


def fingerprint(model: nn.Module) -> str:
    """Tells the weights of a model from others; adapters do not count. Ranks make it together."""
    digest = hashlib.sha256()
    for name, parameter in without_adapters(model).named_parameters():
        if ".lora_" not in name:
            # A sample of each tensor is enough to tell two models apart, and takes no time.
            sample = whole(parameter.detach()).flatten()[:256].float().cpu().numpy()
            digest.update(name.encode() + sample.tobytes())
    return digest.hexdigest()


def begin_save(
    folder: Path, parts: TrainerParts, *, train_step: int, mesh: DeviceMesh | None = None
) -> Callable[[], None]:
    """Copy a trainer, and write it into an empty folder in threads; the function that waits for the end.

    Ranks that hold slices of `mesh` all call this, and each writes its own, as
    ``torch.distributed.checkpoint`` reads them; no rank waits for another one's disk. Once all have finished,
    `join_model` completes the folder. The function raises OSError where the disk takes no more.
    """
    rank = 0 if mesh is None else mesh.get_rank()
    adapters: dict[str, torch.Tensor] = {}
    if rank == 0:
        # Every rank has the same of what is written here.
        facts = {"train_step": train_step, "dtype": parts.dtype}
        save_json({**parts.kind(), **facts}, folder / "trainer.json")
        if is_lora(parts.model):
            (folder / "adapter").mkdir()
            adapters = {name: weight.detach().to("cpu", copy=True) for name, weight in adapter_weights(parts.model)}
            save_json(adapter_config(parts.model), folder / "adapter" / "adapter_config.json")
    state = _weights(parts)
    for prefix, optimizer in parts.optimizers.items():
        state |= {f"{prefix}.{name}": value for name, value in optimizer.state_tensors()}
    copies, places = {}, {}
    for name, value in state.items():
        place, block = own_block(value)
        # Of several ranks with the same block one has it, and the others have an empty one.
        if block.numel():
            # A copy: training goes on while this is written, and its changes belong to the next checkpoint.
            copies[name] = block.to("cpu", copy=True)
            places[name] = {hf.SAVED_OFFSETS_KEY: [part.start for part in place]}
    described = {hf.CUSTOM_METADATA_KEY: json.dumps(places), hf.DCP_VERSION_KEY: str(hf.HF_DCP_VERSION)}
    (folder / STATE).mkdir(exist_ok=True)
    shard = folder / STATE / f"shard-{rank:05d}.safetensors"
    files = _model_files(parts.model, rank, 1 if mesh is None else mesh.size())
    threads = ThreadPoolExecutor(2, "forebay-checkpoint")
    writing = [
        threads.submit(save_tensors, copies, shard, **described),
        threads.submit(_write_model, parts.model, files, folder / "model"),
    ]
    if adapters:
        writing.append(threads.submit(save_tensors, adapters, folder / "adapter" / ADAPTER_FILE))
    threads.shutdown(wait=False)

    def finish() -> None:
        # All, also where one fails: the folder is deleted next.
        wait(writing)
        for future in writing:
            future.result()

    return finish


def _weights(parts: TrainerParts) -> dict[str, torch.Tensor]:
    """All that training changes in the models, slices as they are; of adapted models the adapters."""
    found: dict[str, torch.Tensor] = {}
    for prefix, model in (("model", parts.model), ("critic", parts.critic)):
        if model is None:
            continue
        adapted = is_lora(model)
        named = {name: p.detach() for name, p in model.named_parameters() if not adapted or ".lora_" in name}
        found |= {f"{prefix}.{name}": value for name, value in named.items()}
        found |= {} if adapted else {f"{prefix}.{name}": value for name, value in _buffers(model).items()}
    return found


def _buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    # `named_buffers` also gives those that the model makes anew, such as frequencies of positions.
    saved = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


def _model_files(model: nn.Module, rank: int, num_ranks: int) -> dict[int, dict[str, torch.Tensor]]:
    """Copies of this rank's share of the whole weights, by number of the file; all of them exist on return.

    A layer is in one file, because what has one name in memory may have several on the disk.
    """
    base = without_adapters(model)
    total = sum(parameter.nbytes for parameter in base.parameters())
    # About as many files as ranks, or more, so that all ranks write.
    limit = min(MODEL_FILE_BYTES, -(-total // num_ranks))
    mine: dict[int, dict[str, torch.Tensor]] = {}
    number = size = 0
    layer = ""
    for name, value in model_weights(model):
        found = re.match(r".*?\.\d+\.", name)
        if size >= limit and (found is None or found[0] != layer):
            number, size = number + 1, 0
        layer, size = found[0] if found else "", size + value.nbytes
        if number % num_ranks == rank:
            mine.setdefault(number, {})[name] = value.detach().to("cpu", copy=True)
    if rank == 0:
        mine[0] |= {name: buffer.to("cpu", copy=True) for name, buffer in _buffers(base).items()}
    return mine


def _write_model(model: nn.Module, files: Mapping[int, Mapping[str, torch.Tensor]], folder: Path) -> None:
    """Write weights in the names that the model's class has on the disk, a folder for each file."""
    from transformers.core_model_loading import revert_weight_conversion

    base: Any = without_adapters(model)
    for number, weights in files.items():
        part = folder / f"part-{number:05d}"
        part.mkdir(parents=True)
        if number == 0:
            with no_progress_bars():
                # The config alone; it writes on the first rank only.
                base.save_pretrained(part, state_dict={})
        save_tensors(revert_weight_conversion(base, dict(weights)), part / "model.safetensors")


def join_model(folder: Path) -> None:
    """Make one Hugging Face folder of the parts that the ranks wrote to `folder`."""
    parts = sorted(folder.glob("part-*"))
    place: dict[str, str] = {}
    for number, part in enumerate(parts, start=1):
        suffix = f"-{number:05d}-of-{len(parts):05d}" if len(parts) > 1 else ""
        name = f"model{suffix}.safetensors"
        with safe_open(part / "model.safetensors", framework="pt") as file:
            place |= dict.fromkeys(file.keys(), name)
        (part / "model.safetensors").rename(folder / name)
        for other in part.iterdir():
            other.replace(folder / other.name)
        part.rmdir()
    if len(parts) > 1:
        sizes = sum(path.stat().st_size for path in folder.glob("model-*.safetensors"))
        index = {"metadata": {"total_size": sizes}, "weight_map": place}
        save_json(index, folder / "model.safetensors.index.json")


def load_trainer(folder: Path, parts: TrainerParts) -> Callable[[], int]:
    """Read for `parts` what `begin_save` wrote; the function that has them use it.

    Each rank reads by itself, however long it takes. In the function, which gives the number of completed train
    steps, ranks wait for each other.

    Raises:
        ValueError: it is of another kind of trainer.
    """
    saved = json.loads((folder / "trainer.json").read_text(encoding="utf-8"))
    for name, mine in parts.kind().items():
        if saved.get(name) != mine:
            raise ValueError(
                f"the checkpoint {str(folder)!r} has {name} = {saved.get(name)!r}, this trainer {mine!r} "
                f"(weights held in {saved.get('dtype')} and in {parts.dtype}); "
                f"build it from the same config and the same starting model (after its warm-up), with the "
                f"version that wrote it; or begin a new run with its model/ as model.source"
            )
    reader = HuggingFaceStorageReader(str(folder / STATE))
    found: dict[str, Any] = reader.read_metadata().state_dict_metadata
    weights = _weights(parts)
    there = {name for name in found if name.startswith(("model.", "critic."))}
    if different := sorted(weights.keys() ^ there):
        raise ValueError(f"the saved weights are of another model; names that differ: {different[:5]}")
    moments: dict[str, dict[str, torch.Tensor]] = {prefix: {} for prefix in parts.optimizers}
    for name, value in sorted(found.items()):
        prefix, _, key = name.partition(".")
        if prefix in moments:
            # Those of a weight that is frozen now are left out; one that was frozen begins without any.
            place = parts.optimizers[prefix].place_for(key, value.size, value.properties.dtype)
            moments[prefix] |= {} if place is None else {key: place}
    places = weights | {f"{prefix}.{key}": v for prefix, own in moments.items() for key, v in own.items()}
    blocks = {name: to_fill(value) for name, value in places.items()}
    # Each rank plans by itself what it reads.
    load(blocks, storage_reader=reader, no_dist=True)

    def use() -> int:
        # In the order of their names: ranks that list the files in another one would move other slices at a time.
        for name, value in sorted(places.items()):
            put_back(value, blocks[name])
        for prefix, optimizer in parts.optimizers.items():
            optimizer.load_state_tensors(moments[prefix])
        return int(saved["train_step"])

    return use
