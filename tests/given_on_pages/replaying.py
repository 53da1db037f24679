import subprocess
import sys

import forebay

forebay.run(
    {
        "name": "NAME",
        "steps": 3,
        "batch_size": 2,
        "rollouts_per_prompt": 2,
        "record": True,
        "produce": {"mode": "separate", "max_staleness": 1},
        "model": {"source": "tiny", "max_context": 32, "tiny": {"hidden_size": 32, "num_layers": 1}},
        "tasks": [
            {"name": "sums", "data": {"source": "addition"}, "judge": "exact_match", "sample": {"max_tokens": 4}}
        ],
    }
)
subprocess.run(
    [
        *(sys.executable, "-c", "from forebay.cli import main; main()"),
        *("replay", "runs/NAME", "--batches-only", "--output", "batches"),
    ],
    check=True,
)
