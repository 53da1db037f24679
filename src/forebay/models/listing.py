"""Loads ``transformers.models`` with the list of models that ``transformers`` has just read for itself.

Each of the two would read the same 3,000 files for its list, a twentieth of what a run's process takes to start.
"""

from pathlib import Path
from unittest.mock import patch

import transformers as transformers
from transformers.utils import import_utils

# In the words of `transformers`, which kept what it found.
_listed = import_utils.define_import_structure(Path(transformers.__file__).parent / "models", prefix="models")
MODELS = {
    needs: {name.removeprefix("models."): names for name, names in found.items() if name.startswith("models.")}
    for needs, found in _listed.items()
}
with patch.object(import_utils, "define_import_structure", return_value=MODELS):
    import transformers.models
