"""Optional libraries: which extra brings each of them, and the one message for one that is missing."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

from forebay.config import ConfigError

EXTRAS = {
    "train": ("torch", "transformers", "tokenizers", "peft", "datasets", "plotext", "gguf", "psutil"),
    "images": ("PIL",),
    "8bit": ("bitsandbytes",),
    "pandas": ("pandas",),
    "sql": ("sqlalchemy", "psycopg"),
    "tasks": ("reasoning_gym", "math_verify"),
    "fragments": ("lmdb",),
    "environments": ("gymnasium",),
    "http": ("aiohttp", "jinja2", "safetensors"),
    "board": ("duckdb", "starlette", "uvicorn"),
    "ray": ("ray", "psutil"),
    "trackers": ("tensorboard", "trackio", "wandb"),
}
"""The modules that ``pip install "forebay[EXTRA]"`` brings, each where it is asked for first."""


class MissingLibraryError(ConfigError, ModuleNotFoundError):
    """An optional library is not installed; the message names the extra that brings it."""


def missing(module: str, wanted_by: str) -> MissingLibraryError:
    """The error for `module`, a dotted name, that `wanted_by` needs and that is not installed."""
    top = module.partition(".")[0]
    extra = next((extra for extra, modules in EXTRAS.items() if top in modules), "all")
    return MissingLibraryError(f"{wanted_by} needs {top}, which is not installed: pip install 'forebay[{extra}]'")


@contextmanager
def needed_by(wanted_by: str) -> Iterator[None]:
    """Import optional libraries inside.

    ::

        with needed_by("the chat endpoint"):
            import starlette

    Raises:
        MissingLibraryError: one of them is not installed.
    """
    try:
        yield
    except MissingLibraryError:
        raise
    except ModuleNotFoundError as error:
        name = error.name or ""
        # A module that is missing inside this package, or inside a library, is a fault and no missing extra.
        if not any(name.partition(".")[0] in modules for modules in EXTRAS.values()):
            raise
        raise missing(name, wanted_by) from None


def require_library(module: str, wanted_by: str) -> None:
    """Raise unless `module` is installed; it is imported where it is used.

    Raises:
        MissingLibraryError: it is not.
    """
    with needed_by(wanted_by):
        if importlib.util.find_spec(module) is None:
            raise missing(module, wanted_by)
