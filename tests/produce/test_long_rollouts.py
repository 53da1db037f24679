"""Prompts whose answers take five train steps: which rules starve them, and that the defaults do not."""

import random

import production_world
import pytest
from production_world import World, train

from forebay.aio import virtual_time
from forebay.config import parse_config
from forebay.engines import RolloutController
from forebay.engines.scripted import ScriptedEngine
from forebay.ledger.bias import length_bias
from forebay.produce import AsyncProduceStrategyConfig
from forebay.runs.config import RunConfig
from forebay.runs.rollouts import build_strategy

EVERY, LONG_TOKENS, TOKEN_S, TRAIN_S = 5, 50, 0.1, 1.0
BATCH_SIZE, STEPS = 8, 40
FAIR_SHARE = BATCH_SIZE * STEPS // EVERY


def is_long(prompt):
    return prompt % EVERY == 0


def length_of(request, *, seed, longest):
    """The others take less than one train step."""
    prompt = int(request.input_ids[0]) - 1
    return LONG_TOKENS if is_long(prompt) else random.Random(f"{seed}/{prompt}").randint(2, 6)


class CountingEngine(ScriptedEngine):
    """Counts what it made, trained on or not."""

    num_tokens = 0

    async def generate(self, request):
        completion = await super().generate(request)
        self.num_tokens += len(completion.response_ids)
        return completion


def trained_long(strategy, monkeypatch):
    """How many long groups are trained, which share of all tokens is wasted, and what the ledger notices."""
    monkeypatch.setattr(production_world, "length_of", length_of)
    monkeypatch.setattr(production_world, "ScriptedEngine", CountingEngine)

    async def main():
        world = World(strategy=strategy, k=1, num_prompts=10_000, token_s=TOKEN_S).build()
        batches = await train(world, BATCH_SIZE, STEPS, train_s=TRAIN_S)
        await world.check_balance()
        groups = [group for batch in batches.values() for group in batch]
        assert len(groups) == BATCH_SIZE * STEPS
        tokens = sum(len(state.response_ids) for group in groups for state in group)
        num_long = sum(is_long(int(group[0].message[0]["content"])) for group in groups)
        return num_long, 1 - tokens / world.engine.num_tokens, length_bias(world.manager.ledger, "t")

    return virtual_time.run(main())


def strategy_of(rule, over_sample):
    return AsyncProduceStrategyConfig(
        max_staleness=2, over_sample_threshold=over_sample, enable_partial_rollout=True, staleness_rule=rule
    )


@pytest.mark.parametrize("rule", ["drop", "admit"])
def test_rules_that_drop_starve_long_rollouts(rule, monkeypatch):
    num_long, wasted, bias = trained_long(strategy_of(rule, 1.0), monkeypatch)
    assert num_long < FAIR_SHARE / 5
    assert wasted > 0.4
    assert bias > 2


@pytest.mark.parametrize(("rule", "most_wasted"), [("requeue", 0.6), ("mask", 0.15), ("correct", 0.15)])
def test_rules_that_keep_the_prompt_train_long_rollouts(rule, most_wasted, monkeypatch):
    num_long, wasted, bias = trained_long(strategy_of(rule, 1.0), monkeypatch)
    assert num_long > 0.9 * FAIR_SHARE
    assert wasted < most_wasted
    assert bias is None


class DefaultStrategy:
    """Builds what a run file with nothing but the mode, and `changes`, builds."""

    def __init__(self, **changes):
        self.config = parse_config(
            RunConfig,
            {
                "name": "run",
                "steps": STEPS,
                "batch_size": BATCH_SIZE,
                "rollouts_per_prompt": 2,
                "model": {"source": "tiny"},
                "tasks": [{"name": "t", "data": {"source": "sorting"}, "judge": {"name": "exact_match"}}],
                "produce": {"mode": "separate", **changes},
            },
        )

    def build(self, *, sync_weights_interval, rollout_controller: RolloutController):
        return build_strategy(self.config, self.config.tasks[0], rollout_controller)


@pytest.mark.parametrize("changes", [{}, {"over_sample_threshold": 2.0}, {"max_staleness": 2}])
def test_the_defaults_of_separate_mode_train_long_rollouts_and_waste_little(changes, monkeypatch):
    num_long, wasted, bias = trained_long(DefaultStrategy(**changes), monkeypatch)
    assert num_long > 0.9 * FAIR_SHARE
    assert wasted < 0.15
    assert bias is None
