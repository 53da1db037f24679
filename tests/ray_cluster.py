"""One local Ray cluster for all tests of a process: starting one takes seconds.

Of several processes that share the suite one runs all tests on Ray: `ON_RAY` in `conftest.py` names them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest

from warm_python import warm_workers

LOGICAL_CPUS = 4
"""What actors may ask for; the machine may have fewer."""


@contextmanager
def local_cluster() -> Iterator[ModuleType]:
    """The module `ray`, connected to the cluster of this process, which is started when it is missing.

    Its GPUs are told to Ray alone.
    """
    ray = pytest.importorskip("ray", reason="ray is not installed; it is an optional extra")
    if not ray.is_initialized():
        with warm_workers():
            ray.init(
                # Not one that somebody else has started on this machine.
                address="local",
                num_cpus=LOGICAL_CPUS,
                num_gpus=4,
                include_dashboard=False,
                object_store_memory=128 << 20,
                log_to_driver=False,
                _node_ip_address="127.0.0.1",
            )
    yield ray
    # Of several users each comes here at the session's end; after the first there is nothing left to do.
    ray.shutdown()
