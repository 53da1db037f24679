"""Fragments for tests, and a producer that numbers them."""

import numpy as np

from forebay.fragments import FragmentMetadata, SampleFragment

SETTINGS = {"max_chunks": 8, "max_staleness": 1, "max_reuse": 1, "fragments_per_chunk": 1}


def make_fragment(worker="w", fid=0, steps=4, size=3, **changes):
    """Its observations say which one it is."""
    values = {
        "obs": np.full((steps, size), fid, np.float32),
        "action": np.arange(steps),
        "next_done": np.zeros(steps, np.bool_),
        "reward": np.ones(steps, np.float32),
        "first": np.arange(steps) == 0,
        "in_state": [],
        "worker_uuid": worker,
        "fid_in_worker": fid,
        "next_obs": np.zeros(size, np.float32),
        "episode_uuids": ["e"] * steps,
        "logprobs": np.zeros(steps, np.float32),
    }
    return SampleFragment(**{**values, **changes})


async def send(buffer, store, worker, fids, version=-1, session="", size=3):
    """Store and announce fragments of `worker`; their ids."""
    ids = []
    for fid in fids:
        fragment_id = store.add_fragment(make_fragment(worker, fid, size=size))
        await buffer.add_fragment(fragment_id, FragmentMetadata(worker, fid, version, session))
        ids.append(fragment_id)
    return ids


def fids(batch):
    return [index.fid_in_worker for index, _ in batch]
