"""Where models compute: the device that a run file names, and the precision that suits it."""

import threading
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING

from forebay.config import ConfigError
from forebay.models.config import Precision, PrecisionKey

if TYPE_CHECKING:
    import torch


ONE_RECORDING = threading.Lock()
"""Held while a CUDA graph is recorded: no thread can then begin another, empty torch's cache, or wait for the
whole device."""


def forgo_cudnn() -> None:
    """Have torch compute no attention with cuDNN, its first choice on Hopper and Blackwell.

    It plans each new shape for some tenths of a second, and an engine or a micro-batch may have a new one at every
    step. With masks it has given wrong tokens, and gradients that are NaN at some lengths.
    """
    import torch

    torch.backends.cuda.enable_cudnn_sdp(False)


def empty_cache() -> None:
    """Give the memory that torch keeps cached on a CUDA device back to it, for other processes."""
    import torch

    with ONE_RECORDING:
        torch.cuda.empty_cache()


def find_device(name: str) -> "torch.device":
    """The device of that name; ``auto`` is the first CUDA device, or the CPU.

    Apple's GPU has to be named: it has no float64, in which the engine in the process draws its tokens.

    Raises:
        ConfigError: torch does not see it.
    """
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, number = name.partition(":")
    is_there = {
        "cpu": not number,
        "cuda": int(number or 0) < torch.cuda.device_count(),
        "mps": torch.backends.mps.is_available(),
    }
    if not is_there.get(kind, False):
        raise ConfigError(
            f"device = {name!r}: torch {torch.__version__} sees {describe_devices()}; set device = 'auto'"
        )
    return torch.device(name)


def gpu_use(device: "torch.device | None") -> dict[str, float]:
    """How a CUDA device is used at this moment; nothing of another device.

    ``gpu/reserved_gb`` is the memory that torch holds in this process. NVIDIA's own counters need the package
    ``nvidia-ml-py`` and a driver that counts (for a part of a GPU it does not): ``gpu/used_gb``, the memory
    that all processes hold, and ``gpu/busy``, the share of the last moment with a kernel under way.
    """
    import torch

    if device is None or device.type != "cuda":
        return {}
    use = {"gpu/reserved_gb": torch.cuda.memory_reserved(device) / 1e9}
    # A run goes on without these: the package may be missing, and the driver may refuse.
    with suppress(ImportError), suppress(import_module("pynvml").NVMLError, RuntimeError):
        use["gpu/used_gb"] = torch.cuda.device_memory_used(device) / 1e9
        use["gpu/busy"] = torch.cuda.utilization(device) / 100
    return use


def precision_on(device: "torch.device", wanted: PrecisionKey) -> Precision:
    """`wanted`, or for ``auto`` bfloat16 on a CUDA device that computes in it, else float32."""
    import torch

    if wanted != "auto":
        return wanted
    # Ampere or later. `torch.cuda.is_bf16_supported` says yes also where it is emulated, slowly.
    has_it = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    return "bfloat16" if has_it else "float32"


def describe_devices() -> str:
    """The GPUs that torch sees on this machine: ``2 x NVIDIA L4``, or ``no GPU``."""
    import torch

    if count := torch.cuda.device_count():
        return f"{count} x {torch.cuda.get_device_name(0)}"
    return "Apple's GPU" if torch.backends.mps.is_available() else "no GPU"
