"""The ranks of a trainer as actors: the same training, and an end that is told."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from forebay.cluster.ranks import RankActor, RayRanks
from forebay.train import TrainConfig, TrainController
from forebay.train.parallel.ranks import RankError
from forebay.types import RolloutState, Status

pytestmark = pytest.mark.xdist_group("ray")


def make_model():
    torch.manual_seed(0)
    sizes = {"vocab_size": 23, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=True))


def make_groups():
    random = np.random.default_rng(0)
    return [
        [
            RolloutState(
                [],
                rollout_id=f"{number}.{member}",
                group_id=number,
                task_name="task",
                prompt_ids=[3 + number, 4],
                response_ids=random.integers(3, 23, length := int(random.integers(1, 8))),
                logprobs=-random.random(length),
                response_model_steps=np.zeros(length),
                reward={"score": float(member % 2)},
                status=Status.COMPLETED,
            )
            for member in range(4)
        ]
        for number in range(3)
    ]


def trainer(ranks=None, num_ranks=1):
    config = TrainConfig(lr=1e-2, token_budget=40, ranks=num_ranks)
    return TrainController(make_model(), config, pad_token_id=0, ranks=ranks)


def test_two_ranks_in_actors_train_as_one_and_the_loss_of_one_is_told(ray):
    actors = [ray.remote(RankActor).options(num_cpus=0.1).remote() for _ in range(2)]
    ranks = RayRanks.join(actors, "cpu", threads=1, search_path=())
    alone, several = trainer(), trainer(ranks, 2)
    for _ in range(2):
        expected, metrics = alone.fit(make_groups()).metrics, several.fit(make_groups()).metrics
        for name in ("train/loss", "train/grad_norm"):
            assert metrics[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6)
    ray.kill(actors[1])
    with pytest.raises(RankError, match=r"rank [01] of 2 failed in"):
        several.fit(make_groups())
    with pytest.raises(RankError):
        several.fit(make_groups())
