"""Whether a group can be stored: found out when it is put, not when the first snapshot is written.

::

    group --types of the fields--> --marshal: plain values all the way down?--> fine, nearly always
                                            '-- no --> `Checker` looks at each value and names the wrong one

Every put pays for this, so it has to be quick. Python's `marshal` walks plain values in C, and refuses other
objects and subclasses; the text that it writes is thrown away. Large values are kept away from it, because it
would copy them. It accepts every object with a buffer as bytes, so an array of Python objects in
``extra_fields`` is not looked into; in `mm_info` and `routed_experts` it is.
"""

from __future__ import annotations

import marshal
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from forebay.replay.format.values import Checker
from forebay.types import FIELDS, RolloutState, SampleParams, Status

_SMALL = [name for name, rule in FIELDS.items() if rule.kind in ("text", "whole", "value") and not rule.large]
_read_small = attrgetter(*_SMALL)


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
                _refuse_type(state)
            experts = state.routed_experts
            if experts is not None and (type(experts) is not np.ndarray or experts.dtype.hasobject):
                _check_each(state, ["routed_experts"])
            if state.mm_info is not None:
                _check_each(state, ["mm_info"])
        small = list(map(_read_small, group))
    except AttributeError:
        for state in group:
            if not isinstance(state, RolloutState):
                raise TypeError(f"a group holds RolloutState objects, got {_show(state)}") from None
        raise
    try:
        # Later formats write a value seen before as a reference, and so accept one that holds itself.
        marshal.dumps(small, 2)
    except ValueError:
        for state in group:
            _check_each(state, _SMALL)


def _check_each(state: RolloutState, names: Sequence[str]) -> None:
    checker = Checker()
    for name in names:
        checker.encode(getattr(state, name), f"rollout {state.rollout_id!r}: {name}")


def _refuse_type(state: RolloutState) -> None:
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


def _show(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
