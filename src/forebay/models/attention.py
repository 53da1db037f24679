"""Kernels of attention: the ones that suit a device, a precision and a model, and putting one in place.

::

    train.attention --attention_choices--> kernels, the best first --use_attention--> a model with one of them

Names are transformers' own, besides ``varlen`` (`forebay.models.varlen`). All compute the same; they differ
in speed, and in what a packed row costs: those of `VARIABLE_LENGTH` take sequences one after the other, where
``sdpa`` and ``eager`` read a mask of the row's length squared.
"""

from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from forebay.config import ConfigError
from forebay.models.config import Attention, AttentionKey, Precision
from forebay.models.loading import auto_class

if TYPE_CHECKING:
    import torch

VARIABLE_LENGTH: tuple[Attention, ...] = ("flash_attention_3", "flash_attention_2", "varlen")
"""Kernels that are told where sequences begin and end, and compute in bfloat16 only."""
_FOR_PACKED: tuple[Attention, ...] = (*VARIABLE_LENGTH, "flex_attention")
_PLAIN: tuple[Attention, ...] = ("sdpa", "eager")
# Flash attention's kernels have no larger ones.
_LARGEST_HEAD = 256


def attention_choices(
    wanted: AttentionKey,
    model_config: Any,
    *,
    device: "torch.device",
    precision: Precision,
    packed: bool = False,
    key: str = "train.attention",
) -> list[Attention]:
    """The kernels that may serve `wanted`, a value of `key`, the best first; one that is named stands alone.

    For ``auto`` they are, where rows are `packed` on a CUDA device, those without a mask, and then ``sdpa``
    and ``eager``. `model_config` is transformers' config of the model.

    Raises:
        ConfigError: the named kernel is not installed, or does not suit the device, precision or model.
    """

    def problem(kernel: Attention) -> str | None:
        return _unsuited(kernel, model_config, precision) or _missing(kernel, device)

    if wanted != "auto":
        if found := problem(wanted):
            raise ConfigError(f"{key} = {wanted!r}: {found}; set {key} = 'auto'")
        return [wanted]
    # In float32 flex attention's backward pass does not fit every GPU.
    first = _FOR_PACKED if packed and device.type == "cuda" and precision == "bfloat16" else ()
    return [kernel for kernel in (*first, *_PLAIN) if problem(kernel) is None]


def planned_attention(
    wanted: AttentionKey, model_config: Any, *, is_gpu: bool, precision: Precision, packed: bool
) -> Attention:
    """The kernel that a plan counts with, on any machine: all without a mask keep what ``varlen`` keeps."""
    kernel: Attention = "varlen" if is_gpu and packed else "sdpa"
    if wanted != "auto":
        kernel = wanted if wanted in _PLAIN else "varlen"
    return next(k for k in (kernel, *_PLAIN) if _unsuited(k, model_config, precision) is None)


def use_attention(model: Any, kernel: Attention) -> None:
    """Make `model`, one of transformers, compute with `kernel`, whatever it was loaded with.

    Raises:
        ValueError: its code does not let the kernel be chosen.
    """
    if kernel == "varlen":
        from forebay.models.varlen import register_varlen

        register_varlen()
    if kernel == "flex_attention":
        from transformers import AttentionInterface
        from transformers.integrations.flex_attention import flex_attention_forward

        # Rows of under 128 tokens would go to a kernel for decoding, which on a GPU sees their neighbors (torch 2.11).
        whole = partial(flex_attention_forward, kernel_options={"FORCE_USE_FLEX_ATTENTION": True})
        AttentionInterface.register("flex_attention", whole)
    if attention_of(model) == kernel:
        return
    model.set_attn_implementation(kernel)
    # Where the code of a model has its attention built in, transformers warns and leaves it as it is.
    if attention_of(model) != kernel:
        raise ValueError(f"models of type {model.config.model_type!r} cannot be switched to attention {kernel!r}")


def attention_of(model: Any) -> Attention:
    """The kernel that a model of transformers computes with."""
    kernel: Attention = model.config.get_text_config()._attn_implementation
    return kernel


def _unsuited(kernel: Attention, model_config: Any, precision: Precision) -> str | None:
    """Why a model cannot compute with `kernel`, whatever the device."""
    # Every model can compute so: a choice never comes out empty.
    if kernel == "eager":
        return None
    if kernel in VARIABLE_LENGTH and precision != "bfloat16":
        return f"it computes in bfloat16 only, not in {precision}"
    kind = f"models of type {model_config.model_type!r}"
    flags = ["_supports_flash_attn"]
    if kernel == "varlen":
        flags += ["_supports_attention_backend"]
    elif kernel not in VARIABLE_LENGTH:
        flags = [{"sdpa": "_supports_sdpa", "flex_attention": "_supports_flex_attn"}[kernel]]
    # Models with code of their own are in no table.
    model_class = auto_class(model_config)._model_mapping.get(type(model_config), None)
    if not all(getattr(model_class, flag, kernel == "sdpa") for flag in flags):
        return f"{kind} do not take it"
    sizes = model_config.get_text_config()
    if kernel in ("sdpa", "varlen") and getattr(sizes, "attn_logit_softcapping", None) is not None:
        return f"{kind} bound their attention scores, and it does not"
    if kernel == "varlen":
        head_dim = getattr(sizes, "head_dim", None) or sizes.hidden_size // sizes.num_attention_heads
        if head_dim % 8 or head_dim > _LARGEST_HEAD:
            return f"its heads have multiples of 8 numbers, up to {_LARGEST_HEAD}, and the model's {head_dim}"
    return None


def _missing(kernel: Attention, device: "torch.device") -> str | None:
    """Why this machine cannot run `kernel`; None: it can."""
    import torch

    if kernel in _PLAIN:
        return None
    if device.type != "cuda":
        return f"it needs a CUDA device, and the run computes on {device}"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return "it needs a GPU of NVIDIA's Ampere generation or a later one"
    from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

    if kernel == "flash_attention_3" and capability[0] != 9:
        return "it needs a GPU of NVIDIA's Hopper generation"
    is_there, package = {
        "flash_attention_2": (is_flash_attn_2_available, "flash-attn --no-build-isolation"),
        "flash_attention_3": (is_flash_attn_3_available, "flash-attn-3"),
        "flex_attention": (lambda: find_spec("triton") is not None, "triton"),
        "varlen": (lambda: True, ""),
    }[kernel]
    return None if is_there() else f"it is not installed: pip install {package}"
