from pathlib import Path

import forebay
from forebay.config import load_config
from forebay.runs.config import RunConfig

_root = Path(forebay.__file__).parent.parent.parent
config = load_config(RunConfig, _root / "recipes" / "demo_tiny.toml", [])
