"""Whether other machines see a run's files under the paths that this one has for them.

::

    here        files_to_see: a new file in the run's folder, the model's files --> {path: size}
    elsewhere   missing(those) --> None, or the first that is not there with that size
"""

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def files_to_see(run_folder: Path, model_folder: Path) -> Iterator[dict[str, int]]:
    """Paths and sizes in bytes of files in both folders, which others look for while the block is open."""
    # A file made just now: each machine may have a folder of this name, with an earlier run in it.
    with tempfile.NamedTemporaryFile(dir=run_folder.absolute(), prefix=".seen-") as seen:
        files = [Path(seen.name), *filter(Path.is_file, model_folder.absolute().iterdir())]
        yield {str(path): path.stat().st_size for path in files}


def missing(sizes: Mapping[str, int]) -> str | None:
    """The first of these files that is not here with that size."""
    return next((p for p, size in sizes.items() if not os.path.exists(p) or os.stat(p).st_size != size), None)
