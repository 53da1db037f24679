"""The records that workers send: a fragment of consecutive environment steps, and its origin.

::

    worker: T steps --> SampleFragment --FragmentStore.add_fragment--> fragment id (text)
                                                                          |
            FragmentMetadata ---------------------------------------------+--> ReplayBufferActor.add_fragment

The payload (`SampleFragment`) goes to the store, and only its id and its `FragmentMetadata` to the buffer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec


# Without the garbage collector: it holds plain values only, and a trainer is given very many of them.
class FragmentIndex(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where a fragment stands in the stream of its worker.

    >>> FragmentIndex("worker-0", 7)
    FragmentIndex(worker_uuid='worker-0', fid_in_worker=7)
    """

    worker_uuid: str
    fid_in_worker: int
    """Counts the fragments of the worker: 0, 1, 2, ..."""


class FragmentMetadata(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """All the buffer knows about a fragment.

    >>> FragmentMetadata("worker-0", 7, model_version=3, session_id="run").fid_in_worker
    7
    """

    worker_uuid: str
    fid_in_worker: int
    model_version: int
    """The version of the oldest weights that acted in it."""
    session_id: str
    """The training session that the weights belong to."""


@dataclass(eq=False)
class SampleFragment:
    """T consecutive steps of one environment, or of several stepped together.

    Invariants: `reward`, `first` and `next_done` lead with T, and so does every array in `obs` and `action`.
    A field holds a numpy array, a plain value, or dicts, lists and tuples of those; other arrays (torch
    tensors on the CPU) are stored as numpy ones.

    >>> import numpy as np
    >>> fragment = SampleFragment(
    ...     obs=np.zeros((8, 4), np.float32), action=np.zeros(8, np.int64), next_done=np.zeros(8, np.bool_),
    ...     reward=np.ones(8, np.float32), first=np.zeros(8, np.bool_), in_state=[], worker_uuid="worker-0",
    ...     fid_in_worker=7, next_obs=np.zeros(4, np.float32), logprobs=np.zeros(8, np.float32))
    >>> fragment.fid_in_worker
    7
    """

    obs: Any
    """[T, ...]: what the policy saw before each step."""
    action: Any
    """[T, ...]: what it did."""
    next_done: Any
    """[T] bool: the episode ended with the step."""
    reward: Any
    """[T] float32: of the step."""
    first: Any
    """[T] bool: the step is the first of its episode."""
    in_state: Any
    """The recurrent state before step 0; empty for a policy without memory."""
    worker_uuid: str
    fid_in_worker: int
    next_obs: Any = None
    """The observation after the last step: its value stands for the future beyond the fragment."""
    episode_uuids: Sequence[str] = ()
    """[T]: the episode of each step."""
    logprobs: Any = None
    """[T] float32: of `action` under the weights that chose it."""
    model_versions: Any = None
    """[T] int64: of the weights that chose each action."""
    extras: Mapping[str, Any] = field(default_factory=dict)
    """Anything else a trainer wants of these steps, by name."""
