"""The devices a plan is for: their memory, arithmetic and bandwidth, from their makers' data sheets."""

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from forebay.config import ConfigError
from forebay.models import Precision, find_device, precision_on

MIB, GIB = 2**20, 2**30

HOST_BYTES_PER_S = 2.5e10
"""The rate between a GPU and the host's memory, by PCIe 4 with 16 lanes."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """One kind of device, and how many there are.

    >>> gpus = parse_devices("2xH100-80GB")
    >>> gpus.count, gpus.name, gpus.memory_bytes // GIB
    (2, 'H100-80GB', 79)
    """

    name: str
    memory_bytes: int
    """The memory that a program can use: less than the name says, since makers count in powers of ten and the
    driver keeps a part."""
    flop_per_s: float | None = None
    """Dense bfloat16 with float32 sums; None: unknown, so no times are given."""
    bytes_per_s: float | None = None
    """Memory bandwidth."""
    link_bytes_per_s: float | None = None
    """To the other GPUs of its machine, in one direction: NVLink, or PCIe where there is none."""
    network_bytes_per_s: float = 100e9 / 8
    """Of one machine to others, in one direction."""
    count: int = 1
    """On all machines."""
    machines: int = 1
    is_gpu: bool = True
    precision: Precision = "bfloat16"
    """Default precision of passes and engines, where a run file leaves it open."""


_GPUS = {
    name: Device(
        name=name, memory_bytes=int(gib * GIB), flop_per_s=tflop * 1e12, bytes_per_s=gigabytes * 1e9,
        link_bytes_per_s=link * 1e9, network_bytes_per_s=gigabit * 1e9 / 8,
    )
    for name, gib, tflop, gigabytes, link, gigabit in (
        # GiB that torch reports; dense bfloat16 TFLOP/s; GB/s of memory; GB/s to other GPUs: half of what
        # data sheets give for both directions of NVLink 3, 4, 5, or of PCIe 4, 5 with 16 lanes; Gbit/s of a
        # machine: adapters of NVIDIA's DGX A100 (8 x 200, InfiniBand HDR), and H100, H200, B200 (8 x 400,
        # NDR); of others one of 100.
        ("A10G-24GB", 22.1, 70, 600, 32, 100),
        ("A100-40GB", 39.4, 312, 1555, 300, 1600),
        ("A100-80GB", 79.2, 312, 2039, 300, 1600),
        ("B200-180GB", 178.4, 2250, 7700, 900, 3200),
        ("H100-80GB", 79.2, 989, 3350, 450, 3200),
        ("H200-141GB", 139.8, 989, 4800, 450, 3200),
        ("L4-24GB", 22.0, 121, 300, 32, 100),
        ("L40S-48GB", 44.4, 362, 864, 32, 100),
        ("RTX4090-24GB", 23.5, 165, 1008, 32, 100),
        ("RTX5090-32GB", 31.4, 210, 1792, 64, 100),
    )
}  # fmt: skip


def parse_devices(text: str, *, network: float | None = None) -> Device:
    """Devices as ``--gpus`` names them: ``H100-80GB``, ``8xH100-80GB``, or on 2 machines ``2x8xH100-80GB``.

    `network` is that of a machine, in Gbit/s; left out, that of its maker's own machines.

    Raises:
        ConfigError: the name is unknown, or there are none of it.
    """
    match = re.fullmatch(r"(?:(\d+)x)??(?:(\d+)x)?([a-z].*)", text.strip(), re.IGNORECASE)
    machines, each = (int(match[1] or 1), int(match[2] or 1)) if match else (0, 0)
    name = match[3].upper() if match else ""
    if name not in _GPUS or machines * each < 1:
        raise ConfigError(f"--gpus {text!r}: write [[MACHINESx]COUNTx]NAME, with one of {', '.join(sorted(_GPUS))}")
    speed = _GPUS[name].network_bytes_per_s if network is None else network * 1e9 / 8
    return replace(_GPUS[name], count=machines * each, machines=machines, network_bytes_per_s=speed)


def this_machine(device: str = "auto") -> Device:
    """The device of a run file on this machine: a GPU with its memory, or the memory that processes may use.

    Raises:
        ConfigError: torch does not see it.
    """
    import torch

    found = find_device(device)
    if found.type == "cuda":
        properties = torch.cuda.get_device_properties(found)
        # Whole words, of which "GeForce RTX 4090" has two for one: an L40 is no L4. Of two sizes the nearer.
        words = re.sub(r"\bRTX (?=\d)", "RTX", properties.name.upper()).replace("-", " ").split()
        like = max(
            (gpu for gpu in _GPUS.values() if gpu.name.split("-")[0] in words),
            key=lambda gpu: -abs(gpu.memory_bytes - properties.total_memory),
            default=Device(name="unknown", memory_bytes=0),
        )
        return replace(
            like,
            name=properties.name,
            memory_bytes=properties.total_memory,
            count=torch.cuda.device_count(),
            precision=precision_on(found, "auto"),
        )
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Device(
        name="this machine (CPU)", memory_bytes=min(installed, _control_group_limit(installed)), is_gpu=False
    )


def _control_group_limit(otherwise: int) -> int:
    """The memory that a container may use, if it is limited."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            return int(Path(path).read_text())
        except (OSError, ValueError):
            # There is no such file, or it says "max".
            continue
    return otherwise
