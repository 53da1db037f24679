"""Names of a package that load something heavy: imported when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def lazy_names(package: str, modules: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """The `__getattr__` of a package whose names load something heavy: each is imported when it is asked for.

    `modules` gives the names that each module of `package` defines, or the module's own name.

    >>> __getattr__ = lazy_names("forebay.train", {"controller": ["TrainController"]})
    >>> __getattr__("TrainControler")
    Traceback (most recent call last):
    AttributeError: module 'forebay.train' has no attribute 'TrainControler'
    """
    homes = {name: module for module, names in modules.items() for name in names}

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        # Here, because the module of extras loads pydantic, which `import forebay` does not.
        from forebay.extras import needed_by

        with needed_by(f"{package}.{name}"):
            module = import_module(f"{package}.{homes[name]}")
        return module if homes[name] == name else getattr(module, name)

    return find
