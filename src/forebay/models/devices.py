"""Where models compute: the device that a run file names, and the precision that suits it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.config import ConfigError
from forebay.models.config import Precision, PrecisionKey

if TYPE_CHECKING:
    import torch

AUTO = "auto"


def find_device(name: str) -> torch.device:
    """The device of that name; ``auto`` is the first GPU, then Apple's, then the CPU.

    Raises:
        ConfigError: torch does not see it.
    """
    import torch

    if name == AUTO:
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    device = torch.device(name)
    is_there = {
        "cpu": True,
        "cuda": (device.index or 0) < torch.cuda.device_count(),
        "mps": torch.backends.mps.is_available(),
    }
    if not is_there[device.type]:
        raise ConfigError(
            f"device = {name!r}: torch {torch.__version__} sees {describe_devices()}; set device = 'auto'"
        )
    return device


def spread_devices(name: str, count: int) -> list[str]:
    """A device for each of `count` processes beside a trainer on `name`.

    On a machine with several GPUs they get one each, those that the trainer does not use first; more
    processes than GPUs share them. A GPU named by its number is meant for all.

    Raises:
        ConfigError: torch does not see the device.
    """
    import torch

    device = find_device(name)
    if device.type != "cuda" or ":" in name:
        return [str(device)] * count
    gpus = torch.cuda.device_count()
    return [f"cuda:{(number + 1) % gpus}" for number in range(count)]


def precision_on(device: torch.device, wanted: PrecisionKey) -> Precision:
    """`wanted`, or for ``auto`` bfloat16 on a GPU that computes in it, else float32."""
    import torch

    if wanted != "auto":
        return wanted
    return "bfloat16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "float32"


def describe_devices() -> str:
    """What torch sees on this machine: ``2 x NVIDIA L4``, or that there is only a CPU."""
    import torch

    if count := torch.cuda.device_count():
        return f"{count} x {torch.cuda.get_device_name(0)}"
    return "Apple's GPU" if torch.backends.mps.is_available() else "no GPU"
