"""Weights that training leaves as they are, such as a tower for images: by patterns of their names.

::

    "model.vision_tower" or "*.layers.[0-7].*" --> weights of these names, or of modules of these names
"""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from itertools import accumulate

from torch import nn

from forebay.config import ConfigError, did_you_mean


def freeze(model: nn.Module, patterns: Iterable[str]) -> Sequence[str]:
    """Let the weights of `model` whose name, or a module's around them, is of `patterns` need no gradient.

    Returns their names. A weight that several layers share has one in each, and is frozen by any of them.

    Raises:
        ConfigError: a pattern is no name's; the message names the nearest.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    >>> freeze(model, ["0", "1.b*"])
    ['0.weight', '0.bias', '1.bias']
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    # Of "model.norm.weight" all of "model", "model.norm", "model.norm.weight".
    paths = {name: list(accumulate(name.split("."), "{}.{}".format)) for name in named}
    known = dict.fromkeys(path for way in paths.values() for path in way)
    found: list[str] = []
    for pattern in patterns:
        matched = [name for name, way in paths.items() if any(fnmatchcase(path, pattern) for path in way)]
        if not matched:
            near = did_you_mean(pattern.rstrip(".*"), known)
            parts = ", ".join(path for path in known if path.count(".") < 2 and path not in named)
            raise ConfigError(
                f"train.frozen: {pattern!r} is the name of no weight and no module of the model; {near}"
                f"its parts are {parts}"
            )
        found += matched
    for name in found:
        named[name].requires_grad_(False)
    return found
