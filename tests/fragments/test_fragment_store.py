"""The store: whole or not at all, shared by processes, bounded."""

import subprocess
import sys
import threading

import numpy as np
import pytest
from fragment_factory import make_fragment

from forebay.fragments import FragmentStore, StoreFullError


@pytest.fixture
def make_store(tmp_path):
    return lambda **settings: FragmentStore(**{"path": tmp_path / "store"} | settings)


def big(fid):
    return make_fragment(fid=fid, obs=np.full((100, 1000), fid, np.float32))


def test_what_is_added_is_there_until_it_is_deleted(make_store):
    store = make_store()
    ids = store.add_fragments([make_fragment(fid=i) for i in range(20)])
    assert len(set(ids)) == len(store) == 20
    assert sorted(store.ids()) == sorted(ids)
    assert [fragment.fid_in_worker for fragment in store.get_fragments(ids)] == list(range(20))
    assert store.stack(ids).obs[:, 0, 0].tolist() == list(range(20))
    assert store.delete_fragments(ids[:5]) == 5
    assert not store.delete_fragments([ids[0]])
    assert ids[0] not in store
    with pytest.raises(KeyError, match=ids[0]):
        store.get_fragment(ids[0])
    store.delete_fragments(store.ids())
    # No fragment, and no byte of one.
    left = store._environment.read().stat(store._payloads)
    assert len(store) == left["leaf_pages"] == left["overflow_pages"] == 0


def test_stores_on_one_folder_are_one_store(make_store):
    (fragment_id,) = make_store().add_fragments([make_fragment(fid=3)])
    assert make_store().get_fragment(fragment_id).fid_in_worker == 3


def test_another_process_reads_and_writes_the_same_fragments(make_store):
    store = make_store()
    fragment_id = store.add_fragment(big(7))
    code = (
        "import sys; from forebay.fragments import FragmentStore\n"
        "store = FragmentStore(sys.argv[1]); fragment = store.get_fragment(sys.argv[2])\n"
        "assert (fragment.obs == 7).all(); print(store.add_fragment(fragment)); import os; os._exit(9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(store.path), fragment_id], capture_output=True, text=True)
    copy = store.get_fragment(done.stdout.strip())
    assert (copy.obs == 7).all(), done.stderr
    assert len(store) == 2


def test_what_is_read_is_a_copy_aligned_and_to_be_written_to(make_store):
    store = make_store()
    for fragment_id in store.add_fragments([big(1), make_fragment()]):
        read = store.get_fragment(fragment_id).obs
        assert read.ctypes.data % 16 == 0
        read[:] = 7
        assert not (store.get_fragment(fragment_id).obs == 7).any()


def test_freed_room_is_used_again(make_store):
    store = make_store(max_bytes=4 << 20)
    for fid in range(500):  # 200 MB in all
        fragment_id = store.add_fragment(big(fid))
        assert (store.get_fragment(fragment_id).obs == fid).all()
        store.delete_fragments([fragment_id])
    assert sum(file.stat().st_blocks * 512 for file in store.path.glob("shard-0/*")) < 20 << 20


def test_a_full_store_refuses_more_and_goes_on_when_there_is_room(make_store):
    store = make_store(max_bytes=1 << 20)
    ids = [store.add_fragment(big(fid)) for fid in range(2)]
    with pytest.raises(StoreFullError, match="exceed its bound of 1048576"):
        store.add_fragment(big(2))
    assert len(store) == 2
    store.delete_fragments([ids[0]])
    assert (store.get_fragment(store.add_fragment(big(3))).obs == 3).all()


def test_threads_share_a_store(make_store):
    store = make_store()
    failures = []

    def work(number):
        try:
            for fid in range(50):
                fragment_id = store.add_fragment(big(number * 50 + fid))
                assert (store.get_fragment(fragment_id).obs == number * 50 + fid).all()
                store.delete_fragments([fragment_id])
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(store) == 0


def test_only_equal_fragments_are_stacked(make_store):
    store = make_store()
    ids = store.add_fragments([make_fragment(), make_fragment(size=9)])
    with pytest.raises(ValueError, match="these 2 have 2"):
        store.stack(ids)
    with pytest.raises(ValueError, match="these 0 have 0"):
        store.stack([])


def test_the_package_loads_lmdb_only_when_a_store_is_used():
    code = "import sys, forebay.fragments; assert not {'lmdb', 'ray', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
