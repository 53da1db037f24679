"""Whether a group can be stored: found out when it is put, not when the first snapshot is written.

::

    group --types of the fields--> --marshal: plain values all the way down?--> fine, nearly always
                                            '-- no --> `payload.Checker` looks at each, names what is wrong

Every put pays for this, so it has to be quick. Python's `marshal` walks plain values in C, and refuses other
objects and subclasses; what it writes is thrown away. Large values are kept away from it: it would copy them.
It takes whatever has a buffer for its bytes, so an array of Python objects in ``extra_fields`` is not looked
into; in `mm_info` and `routed_experts` it is.
"""

from __future__ import annotations

import marshal
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from forebay.replay.format.values import Checker
from forebay.types import ROLLOUT_FIELDS, RolloutState, SampleParams, Status

_LARGE = ("response", "mm_info", "routed_experts")
"""Kept away from `marshal`."""
_ARRAYS = ("prompt_ids", "tokens", "response_ids", "logprobs", "response_mask", "response_model_steps")
"""Converted when they are assigned."""
_APART = ("status", "sample_params")
"""Of classes that are stored by themselves."""
_PLAIN = tuple(name for name in ROLLOUT_FIELDS if name not in (*_LARGE, *_ARRAYS, *_APART))

_read_plain = attrgetter(*_PLAIN)


def check_group(group: Sequence[RolloutState]) -> None:
    """Look at every value of the rollouts that a store or a snapshot has to hold.

    Raises:
        TypeError: a member is no `RolloutState`, or a field is of a type that it never has.
        ValueError: a value cannot be stored; the message says where it is.
    """
    try:
        for state in group:
            if (
                type(state.status) is not Status
                or type(state.message) is not list
                or type(state.response) is not str
                or ((params := state.sample_params) is not None and type(params) is not SampleParams)
            ):
                _refuse(state)
            if state.mm_info is not None or state.routed_experts is not None:
                _check_large(state)
        plain = list(map(_read_plain, group))
    except AttributeError:
        for state in group:
            if not isinstance(state, RolloutState):
                raise TypeError(f"a group holds RolloutState objects, got {_show(state)}") from None
        raise
    try:
        # Later formats write what was seen before as a reference, and so accept a value that holds itself.
        marshal.dumps(plain, 2)
    except ValueError:
        for state in group:
            _check_each(state, _PLAIN)


def _check_large(state: RolloutState) -> None:
    if not (state.routed_experts is None or _is_array(state.routed_experts)):
        _check_each(state, ["routed_experts"])
    if state.mm_info is not None:
        _check_each(state, ["mm_info"])


def _is_array(value: Any) -> bool:
    return type(value) is np.ndarray and not value.dtype.hasobject


def _refuse(state: RolloutState) -> None:
    """Say which field of the rollout is of a type that it never has."""
    expected = {
        "status": (Status, "a Status such as Status.COMPLETED"),
        "message": (list, 'a chat: a list of messages such as {"role": "user", "content": "1+1="}'),
        "response": (str, "text"),
        "sample_params": (SampleParams | None, "a SampleParams, or None"),
    }
    for name, (kind, said) in expected.items():
        value = getattr(state, name)
        if not isinstance(value, kind) or (name != "sample_params" and type(value) is not kind):
            raise TypeError(f"rollout {state.rollout_id!r}: {name} must be {said}, got {_show(value)}")


def _check_each(state: RolloutState, names: Sequence[str]) -> None:
    checker = Checker()
    for name in names:
        checker.encode(getattr(state, name), f"rollout {state.rollout_id!r}: {name}")


def _show(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
