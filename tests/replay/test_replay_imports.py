"""What importing the package costs."""

import subprocess
import sys


def test_importing_replay_loads_nothing_heavy():
    heavy = ["torch", "ray", "transformers", "pandas", "sqlalchemy", "pyarrow"]
    code = f"import sys, forebay.replay; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
