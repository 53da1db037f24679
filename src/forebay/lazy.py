"""Names of a package that load something heavy: imported when they are asked for."""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any


def lazy_names(package: str, file: str) -> Callable[[str], Any]:
    """The `__getattr__` of a package whose names load something heavy: each is imported when it is asked for.

    They are those that the package, whose source is `file`, imports for type checkers alone: under
    ``if TYPE_CHECKING:``, each from the module that defines it, or a module from the package itself.

    >>> import forebay.train
    >>> __getattr__ = lazy_names("forebay.train", forebay.train.__file__)
    >>> __getattr__("TrainControler")
    Traceback (most recent call last):
    AttributeError: module 'forebay.train' has no attribute 'TrainControler'
    """

    @cache
    def homes() -> dict[str, str]:
        # Not before a name is asked for: importing the package is to cost nothing.
        import ast

        blocks = [node for node in ast.parse(Path(file).read_text("utf-8")).body if isinstance(node, ast.If)]
        imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
        return {entry.name: node.module or "" for node in imports for entry in node.names}

    def find(name: str) -> Any:
        if name not in homes():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        # Here, because the module of extras loads pydantic, which `import forebay` does not.
        from forebay.extras import needed_by

        home = homes()[name]
        with needed_by(f"{package}.{name}"):
            if home == package:
                return import_module(f"{package}.{name}")
            return getattr(import_module(home), name)

    return find
