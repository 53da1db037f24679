"""Values with arrays between a process and its own children: msgpack and raw buffers, no pickle.

::

    send: value --msgpack--> `Note` (arrays are numbered) | buffer 0 | buffer 1 | ...
    receive: each buffer is read into new memory, of which the array or tensor becomes a view

    model --to_parts--> {"class", "config", "tensors", ...} --a value--> from_parts --> model

A value is made of None, numbers, text, lists, dicts with text keys, numpy arrays and CPU tensors (any dtype).
"""

from __future__ import annotations

import importlib
import json
import socket
import sys
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn

from forebay.io.channel import BlockingChannel
from forebay.io.messages import Alive, Note, sizes_of
from forebay.train.model.critic import Critic

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

MAX_VALUE_BYTES = 64 << 20
"""Of a value without its arrays: the names of a model's weights are some hundred kilobytes."""

_ARRAY = 1
"""The number of our one msgpack extension type."""


def connect(sock: socket.socket, limit_s: float | None = None) -> BlockingChannel:
    """A channel to another process of this trainer: with messages of any size, as whole models go through."""
    return BlockingChannel(
        sock, limit_s=limit_s, max_header_bytes=MAX_VALUE_BYTES, max_frame_bytes=sys.maxsize
    )


def send(channel: BlockingChannel, value: Any) -> None:
    """Send one value.

    Raises:
        TypeError: it holds something else than arrays and plain values.
        OSError: the other end is closed, or takes nothing within the channel's limit (`TimeoutError`).
    """
    buffers: list[Bytes] = []
    encoded = msgspec.msgpack.encode(value, enc_hook=lambda array: _take_out(array, buffers))
    channel.send(Note(msgspec.Raw(encoded), sizes_of(buffers)), [buffer.data for buffer in buffers])


def receive(channel: BlockingChannel) -> Any:
    """Wait for one value; signs of life are skipped.

    Raises:
        EOFError: the other end is closed.
        TimeoutError: nothing came within the channel's limit.
    """
    while isinstance((received := channel.receive())[0], Alive):
        pass
    message, buffers = received
    assert isinstance(message, Note)
    left = iter(buffers or ())
    return msgspec.msgpack.decode(message.value, ext_hook=lambda _, data: _put_back(data, next(left)))


class _Place(msgspec.Struct):
    """Stands for an array in the value."""

    tensor: bool
    dtype: str
    shape: list[int]


def _take_out(array: Any, buffers: list[Bytes]) -> msgspec.msgpack.Ext:
    """The value's entry of an array, whose content is added to `buffers`."""
    if isinstance(array, torch.Tensor):
        tensor = array.detach().contiguous()
        place = _Place(True, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
        buffers.append(tensor.flatten().view(torch.uint8).numpy())
    elif isinstance(array, np.ndarray):
        place = _Place(False, array.dtype.str, list(array.shape))
        buffers.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    else:
        raise TypeError(f"a message holds arrays and plain values, got {type(array).__name__}")
    return msgspec.msgpack.Ext(_ARRAY, msgspec.msgpack.encode(place))


def _put_back(data: memoryview, buffer: Bytes) -> Any:
    """The array of an entry."""
    place = msgspec.msgpack.decode(data, type=_Place)
    if place.tensor:
        dtype = getattr(torch, place.dtype)
        # Of nothing torch makes no view.
        flat = torch.from_numpy(buffer).view(dtype) if len(buffer) else torch.empty(0, dtype=dtype)
        return flat.reshape(place.shape)
    return buffer.view(place.dtype).reshape(place.shape)


def to_parts(model: nn.Module) -> dict[str, Any]:
    """The class, config and tensors of `model`; on the CPU, and not copied if they are there already.

    Raises:
        ValueError: it is not a model of transformers, or has quantized weights.
    """
    if isinstance(model, Critic):
        return {"body": to_parts(model.body), "head": dict(model.head.state_dict())}
    transformers_model: Any = model
    if not hasattr(model, "save_pretrained") or getattr(model, "hf_quantizer", None) is not None:
        raise ValueError(
            f"{type(model).__name__} cannot be sent to several ranks, because only plain models of "
            f"transformers can; give one, or train with ranks = 1"
        )
    config, generation = transformers_model.config, getattr(model, "generation_config", None)
    return {
        "class": _name(type(model)),
        "config_class": _name(type(config)),
        "config": config.to_json_string(use_diff=False),
        "attention": config._attn_implementation,
        "generation": generation.to_json_string(use_diff=False) if generation is not None else None,
        "tensors": {name: tensor.detach().cpu() for name, tensor in _tensors(model).items()},
        "frozen": [name for name, parameter in model.named_parameters() if not parameter.requires_grad],
    }


def from_parts(parts: Mapping[str, Any]) -> nn.Module:
    """The model that `to_parts` was given; it keeps the tensors of `parts`."""
    if "body" in parts:
        critic = Critic(from_parts(parts["body"]), parts["head"]["weight"].shape[1])
        critic.head.load_state_dict(parts["head"])
        return critic
    config = _find(parts["config_class"]).from_dict(json.loads(parts["config"]))
    model: Any = _find(parts["class"])._from_config(config, attn_implementation=parts["attention"])
    if parts["generation"] is not None:
        model.generation_config = type(model.generation_config).from_dict(json.loads(parts["generation"]))
    for name, tensor in _tensors(model).items():
        tensor.data = parts["tensors"][name]
    for name in parts["frozen"]:
        model.get_parameter(name).requires_grad_(False)
    return model.eval()  # type: ignore[no-any-return]


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Weights and saved buffers; each once, though it may have several names."""
    saved = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    return {**dict(model.named_parameters()), **buffers}


def _name(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _find(name: str) -> Any:
    module, _, qualified = name.partition(":")
    return getattr(importlib.import_module(module), qualified)
