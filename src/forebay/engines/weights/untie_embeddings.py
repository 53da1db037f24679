"""A model folder whose output layer has weights of its own, where the model shares them with its embedding.

vLLM on a CPU packs the output layer when it starts, and a reload does not pack a shared one again: it would
go on with the old one, and sample from a mixture of two models. With weights of its own it is reloaded like
all others. On a GPU nothing is packed, and sharing saves memory.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

_WEIGHTS = "*.safetensors"
_INDEX = "*.safetensors.index.json"


def shared_weights(model_folder: Path) -> dict[str, str]:
    """Which weights of the model in `model_folder` are another's under a second name; {}: none."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model_folder, local_files_only=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return dict(model.all_tied_weights_keys)


def write_untied(model_folder: Path, target: Path, shared: dict[str, str]) -> Path:
    """Copy the model to `target` with the `shared` weights written out; return `target`."""
    from safetensors.torch import load_file, save_file

    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(model_folder, target, ignore=shutil.ignore_patterns(_WEIGHTS, _INDEX))
    weights = {}
    for file in sorted(model_folder.glob(_WEIGHTS)):
        weights.update(load_file(file))
    weights.update({name: weights[source].clone() for name, source in shared.items()})
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    config["tie_word_embeddings"] = False
    (target / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return target
