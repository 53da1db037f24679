from pathlib import Path

from forebay.runs.config import RunConfig

config = RunConfig.model_validate(
    {
        "name": "by_hand",
        "steps": 1,
        "batch_size": 2,
        "rollouts_per_prompt": 2,
        "produce": {"mode": "separate"},
        "cluster": "ray",
        "model": {"source": "tiny", "max_context": 32, "tiny": {"hidden_size": 32, "num_layers": 1}},
        "tasks": [
            {"name": "sums", "data": {"source": "addition"}, "judge": "exact_match", "sample": {"max_tokens": 4}}
        ],
    }
)
folder = Path("runs/by_hand")
