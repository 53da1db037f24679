"""The weights that an adapter lies on top of: telling them from others, and refusing what does not fit them.

::

    trainer   starting weights --fingerprint--> config["base_fingerprint"] --+
                                                                             +-- equal? adapters alone will do
    engine    starting weights --fingerprint---------------------------------+   no: BaseDiffersError

Trainers and engines do not know each other, so what both must agree on is here.
"""

import hashlib
import zlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import torch

Weights: TypeAlias = "Iterable[tuple[str, torch.Tensor]]"
"""Parameters by name, on their way from a trainer to engines."""

AdapterConfig: TypeAlias = "Mapping[str, Any]"
"""The description of LoRA adapters: peft's ``adapter_config.json``, with a `BASE_FINGERPRINT` on the way to
engines."""

BASE_FINGERPRINT = "base_fingerprint"
"""The key, in the config of adapters on their way to engines, of their starting weights' `fingerprint`."""


class AdaptersRefusedError(ValueError):
    """An engine cannot generate with these adapters exactly, and has changed nothing; give it all weights."""


class BaseDiffersError(AdaptersRefusedError):
    """The engine holds other weights than those below the adapters; with those it could use them."""


def fingerprint(weights: Weights) -> str:
    """Tells these weights from all others: names, dtypes, shapes and every bit count, their order does not.

    It reads everything: about a second for each GB, plus the way from the device.
    """
    import torch

    lines = []
    for name, tensor in weights:
        data = tensor.detach().cpu().contiguous()
        checksum = zlib.crc32(data.reshape(-1).view(torch.uint8).numpy().data) if data.numel() else 0
        lines.append(f"{name} {data.dtype} {tuple(data.shape)} {checksum:08x}")
    # An engine may go through the same weights in another order than a trainer.
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()
