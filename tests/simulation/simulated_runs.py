"""Small run files and clusters for tests of the simulation."""

from forebay.config import parse_config
from forebay.runs.config import RunConfig
from forebay.simulation import ClusterConfig

PARTIAL = {
    "mode": "separate",
    "max_staleness": 2,
    "staleness_rule": "drop",
    "over_sample_threshold": 1.0,
    "enable_partial_rollout": True,
}


def run_table(**changes):
    data = {"source": "sorting", "arguments": {"length": 3, "letters": 5}}
    table = {
        "name": "simulated",
        "steps": 100,
        "batch_size": 4,
        "rollouts_per_prompt": 2,
        "model": {"source": "tiny"},
        "tasks": [{"name": "t", "data": data, "judge": {"name": "exact_match"}, "sample": {"max_tokens": 10_000}}],
        "produce": {
            "mode": "separate",
            "max_staleness": 1,
            "staleness_rule": "drop",
            "over_sample_threshold": 0.5,
            "enable_partial_rollout": False,
        },
    }
    return {**table, **changes}


def run_config(**changes):
    return parse_config(RunConfig, run_table(**changes))


def cluster(**changes):
    """4 slots of 10 tokens/s; a batch of 8 responses of 100 tokens takes 20 s."""
    settings = {"slots": 4, "tokens_per_s": 40.0, "train_s": 5.0, "sync_s": 1.0, "lengths": {"constant": 100}}
    return ClusterConfig(**{**settings, **changes})
