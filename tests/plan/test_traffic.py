"""Traffic between ranks, engines and machines, by the table of docs/scale.md; and the run files for 7 B and 70 B."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

from forebay.config import ConfigError, load_config
from forebay.plan import make_plan, parse_devices
from forebay.plan.hardware import GIB
from forebay.plan.report import sentences
from forebay.plan.traffic import HOST_BYTES_PER_S, LINK_SHARE, RAY_BYTES_PER_S
from forebay.runs.config import RunConfig
from forebay.runs.placement import SERVERS
from forebay.train import TrainConfig, TrainController
from forebay.types import RolloutState, Status

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
HIDDEN, LAYERS, VOCABULARY = 256, 2, 2000
RAY = {"num_engines": 2, "gpus_per_engine": 1, "gpus_per_trainer": 1}


@pytest.fixture(name="model", scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=512,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
    ).save_pretrained(folder)
    return folder


def plan(model: Path, gpus: str, *, network: float | None = None, cluster: Any = None, table: Any = (), **train: Any):
    """16 sequences of 128 tokens, of which 4 fit a micro-batch; `table` has more of the run file."""
    config = RunConfig.model_validate(
        {
            "name": "planned",
            "steps": 10,
            "batch_size": 4,
            "rollouts_per_prompt": 4,
            "model": {"source": str(model)},
            "cluster": cluster and {"name": "ray", "arguments": cluster},
            # Ranks and engines have GPUs of their own on a cluster.
            "produce": {"mode": "separate" if cluster else "colocated"},
            "tasks": [
                {
                    "name": "sorting",
                    "data": {"source": "sorting", "size": 50},
                    "judge": "exact_match",
                    "sample": {"max_tokens": 96},
                }
            ],
            "train": {"token_budget": 512, **train},
            **dict(table),
        }
    )
    return make_plan(config, parse_devices(gpus, network=network), prompt_tokens=32)


def test_machines_stand_before_their_gpus() -> None:
    found = parse_devices("2x8xH100-80GB")
    assert (found.machines, found.count, found.name) == (2, 16, "H100-80GB")
    assert parse_devices("8xH100-80GB").machines == 1
    assert parse_devices("2x8xH100-80GB", network=400).network_bytes_per_s == 50e9
    with pytest.raises(ConfigError, match=r"2x0xH100-80GB.*write \[\[MACHINESx\]COUNTx\]NAME"):
        parse_devices("2x0xH100-80GB")


def test_weights_are_gathered_twice_and_gradients_summed_for_each_micro_batch(model: Path) -> None:
    found = plan(model, "4xH100-80GB", ranks=4)
    (traffic,) = found.traffic.values()
    # 4 sequences a rank: one micro-batch, in bfloat16, and gradients in float32.
    assert traffic.weights_bytes == found.num_parameters * (2 * 2 + 4)
    assert traffic.weights_s == pytest.approx(traffic.weights_bytes / 450e9 / LINK_SHARE)
    assert traffic.layers_bytes == 0
    more = plan(model, "4xH100-80GB", ranks=4, token_budget=128).traffic[1]
    assert more.weights_bytes == 4 * traffic.weights_bytes
    # The reference's pass gathers, too, and has no gradients.
    twice = plan(model, "4xH100-80GB", ranks=4, kl_coef=0.1).traffic[1]
    assert twice.weights_bytes == found.num_parameters * (3 * 2 + 4)


def test_the_traffic_within_layers_is_that_of_the_table(model: Path) -> None:
    tokens = 2 * 4 * 128
    split = plan(model, "4xH100-80GB", ranks=4, parallel={"tensor": 2}).traffic[1]
    # Two forward and five backward, of a ring, which sends each number twice but for the rank's own.
    assert split.layers_bytes == LAYERS * 7 * tokens * HIDDEN * 2 * (2 * 1 / 2)
    shared = plan(model, "4xH100-80GB", ranks=4, parallel={"context": 2}).traffic[1]
    # Queries and results of 4 heads, keys and values of 2; half of it goes to another rank.
    assert shared.layers_bytes == 2 * LAYERS * tokens / 2 * (2 * HIDDEN + 2 * HIDDEN // 2) * 2 / 2
    # Both ranks of a group see all of its sequences, and gather only their part of layers.
    outside = 2 * VOCABULARY * HIDDEN
    parameters = plan(model, "4xH100-80GB", ranks=4).num_parameters
    own = outside + (parameters - outside) / 2
    assert split.weights_bytes == pytest.approx(own * (2 * 2 + 4) * 2)


def test_experts_that_are_shared_out_stay_and_tokens_travel_as_counted_on_two_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm: None
) -> None:
    """A step of a tiny Qwen3-MoE on two gloo ranks, each of which counts what it gives to collectives."""
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "num_experts_per_tok": 2, "num_experts": 4}
    mixture = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, moe_intermediate_size=16))
    mixture.save_pretrained(tmp_path / "model")
    shared_out = {"tensor": "experts"}
    found = plan(tmp_path / "model", "2xH100-80GB", ranks=2, parallel=shared_out).traffic[1]
    config = TrainConfig(
        ranks=2, parallel=shared_out, token_budget=512, loss="counted_collectives:loss", dtype="float32"
    )
    made = Counter[str]()
    for name, sizes_of_tensors in collectives(mixture, config, tmp_path, monkeypatch):
        # The larger one is whole: what was gathered, or is summed up.
        made[name] += max(sizes_of_tensors)
    # Counted in float32; the plan is of passes in bfloat16. Of both ranks.
    assert made["_allgather_base_"] / 2 + made["_reduce_scatter_base_"] == 2 * found.weights_bytes
    # Half of the tokens stay, in the long run; nothing is computed for the last of a sequence.
    travelled = made["all_to_all_single"] / 2 / 2 / 2
    assert travelled == pytest.approx(found.layers_bytes * 127 / 128)
    gathered = plan(tmp_path / "model", "2xH100-80GB", ranks=2).traffic[1]
    in_experts = sum(weight.numel() for name, weight in mixture.named_parameters() if ".experts." in name)
    # Two micro-batches, each of which gathers twice and sums up once.
    assert gathered.weights_bytes - found.weights_bytes == in_experts * (2 * 2 + 4) * 2
    assert gathered.layers_bytes == 0
    # Two copies of two ranks each, of which each has half of the experts, and slices these with its copy.
    hybrid = plan(tmp_path / "model", "4xH100-80GB", ranks=4, parallel={"tensor": "experts", "replicas": 2})
    others = hybrid.num_parameters - in_experts
    assert hybrid.traffic[2].weights_bytes == others * (2 * 2 + 4) + others * 4 / 2 + in_experts * (2 * 2 + 4) / 2
    assert hybrid.traffic[2].layers_bytes == found.layers_bytes / 2


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_split_matrices_sum_up_hidden_states_as_counted_on_two_ranks(
    kind: str, again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm: None
) -> None:
    """Every query, key, value, gate and up projection sums up the gradient of its own input."""
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    if kind == "qwen3_moe":
        sizes |= {"num_experts_per_tok": 2, "num_experts": 4, "moe_intermediate_size": 16, "mlp_only_layers": [0]}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))
    model.save_pretrained(tmp_path / "model")
    # Old log probabilities are of a pass without gradient.
    settings = {"parallel": {"tensor": 2}, "gradient_checkpointing": again, "mini_batches": 2}
    found = plan(tmp_path / "model", "2xH100-80GB", ranks=2, **settings).traffic[1]
    config = TrainConfig(ranks=2, token_budget=512, loss="counted_collectives:loss", dtype="float32", **settings)
    summed = 0
    for name, given in collectives(model, config, tmp_path, monkeypatch):
        # Hidden states of whole sequences; the others are of norms, of the router, and of how tokens were routed.
        if "all_reduce" in name.replace("allreduce", "all_reduce") and max(given) % (127 * 32 * 4) == 0:
            summed += max(given)
    # Of both ranks, each of which sends as much in a ring, in float32; nothing is computed for a last token.
    assert summed / 2 / 2 == pytest.approx(found.layers_bytes * 127 / 128)


def collectives(
    model: Any, config: TrainConfig, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, list[int]]]:
    """Those of both ranks in one train step: names, and sizes of their tensors."""
    monkeypatch.setenv("COUNTED", str(folder / "made"))
    monkeypatch.setenv("COUNTED_FOR", str(os.getpid()))
    trainer = TrainController(model, config, pad_token_id=0)
    try:
        for file in folder.glob("made.*"):
            # Of the trial at the start.
            file.unlink()
        trainer.fit([[rollout(group, member) for member in range(4)] for group in range(4)])
    finally:
        trainer.close()
    for file in folder.glob("made.*"):
        for line in file.read_text().splitlines():
            name, *sizes = line.split()
            yield name, list(map(int, sizes))


def rollout(group: int, member: int) -> RolloutState:
    random = np.random.default_rng((group, member))
    return RolloutState(
        [],
        rollout_id=f"{group}.{member}",
        group_id=group,
        prompt_ids=random.integers(2, 50, 32),
        response_ids=random.integers(2, 50, 96),
        logprobs=-np.ones(96),
        response_model_steps=np.zeros(96),
        reward={"score": float(member)},
        status=Status.COMPLETED,
    )


def test_several_machines_have_hybrid_beside_full_sharding(model: Path) -> None:
    full = plan(model, "3x2xH100-80GB", network=8, cluster=RAY, ranks=4)
    assert list(full.traffic) == [1, 2]
    bytes_by_rank = full.num_parameters * 8
    # A ring over two machines: half of the weights come from the other one, at 1 GB/s.
    assert full.traffic[1].weights_s == pytest.approx(bytes_by_rank / 2 / 1e9 / LINK_SHARE)
    hybrid = plan(model, "3x2xH100-80GB", network=8, cluster=RAY, ranks=4, parallel={"replicas": 2})
    assert list(hybrid.traffic) == [2, 1]
    assert hybrid.traffic == {copies: full.traffic[copies] for copies in (2, 1)}
    assert full.traffic[2].weights_bytes == bytes_by_rank + 4 * full.num_parameters / 2
    said = list(sentences(full))
    assert said[1].startswith("A rank's slices are ")
    assert said[2].startswith("With train.parallel.replicas=2, a rank's slices are ")
    slow, fast = (plan(model, "3x2xH100-80GB", network=n, cluster=RAY, ranks=4).times for n in (1, 8))
    assert slow.training_s > fast.training_s


def test_a_sync_between_machines_is_gathered_on_the_first_and_goes_on_by_ray(model: Path) -> None:
    found = plan(model, "3x2xH100-80GB", network=16, cluster=RAY, ranks=4)
    # In bfloat16: to the other machine of ranks, by their collectives, and to one with engines.
    num_bytes = found.num_parameters * 2
    assert found.sync_bytes == 2 * num_bytes
    host_s = 2 * num_bytes / HOST_BYTES_PER_S
    gathered_s = num_bytes / 2 / 2e9 / LINK_SHARE
    assert found.sync_s == pytest.approx(num_bytes / RAY_BYTES_PER_S + gathered_s + host_s)
    assert "GB between machines" in " ".join(sentences(found))
    # On one machine nothing crosses.
    assert plan(model, "4xH100-80GB", ranks=4).sync_bytes == 0
    two = plan(model, "4x2xH100-80GB", cluster=RAY, ranks=4)
    assert two.sync_bytes == 3 * num_bytes
    # A machine that has all slices gathers from no other.
    hybrid = plan(model, "4x2xH100-80GB", cluster=RAY, ranks=4, parallel={"replicas": 2})
    assert hybrid.sync_bytes == 2 * num_bytes


def test_a_sync_is_of_adapters_alone_where_engines_take_them(model: Path) -> None:
    whole, alone = (plan(model, "4x2xH100-80GB", cluster=RAY, ranks=4, lora_rank=rank) for rank in (0, 4))
    adapters = alone.num_parameters - whole.num_parameters
    # In float32, to two machines with engines: every rank has all of them.
    assert alone.sync_bytes == 4 * adapters * 2
    assert alone.sync_s < whole.sync_s / 10
    # Servers that engines start there are started for adapters, and any may be told to take none.
    own = {"name": "vllm", "arguments": {"servers": 1}}
    refusing = {"name": "vllm", "arguments": {"servers": 1, "takes_adapters": False}}
    for engine, is_merged in ((own, False), (refusing, True), ({"arguments": {"takes_adapters": False}}, True)):
        found = plan(model, "4x2xH100-80GB", cluster=RAY, ranks=4, lora_rank=4, table={"engine": engine})
        assert found.sync_bytes == (alone.num_parameters * 2 * 3 if is_merged else alone.sync_bytes)


def test_servers_on_ray_are_sent_buckets_or_read_a_file(model: Path) -> None:
    def planned(name: str, gpus: str = "4x2xH100-80GB", **more: Any) -> Any:
        engine = {"name": name, "arguments": {"servers": 1}} if name in SERVERS else {"name": name}
        return plan(model, gpus, cluster=RAY, ranks=4, table={"engine": engine}, **more)

    size = planned("transformers").num_parameters * 2
    first, by_file = (planned(name).sync_s for name in ("transformers", "sglang"))
    assert by_file - first == pytest.approx(2 * size / HOST_BYTES_PER_S)
    # To each server of its own, by a sender that reads the host's memory, in place of a copy by Ray.
    (sent, slow) = (planned("vllm", network=n) for n in (1600, 16))
    assert sent.sync_bytes == slow.sync_bytes == size * (1 + 2)
    gathered = size / 2 / 200e9 / LINK_SHARE
    assert sent.sync_s == pytest.approx(gathered + (2 + 2) * size / HOST_BYTES_PER_S)
    assert slow.sync_s == pytest.approx(size * (1 / 2 + 2) / 2e9 / LINK_SHARE + 2 * size / HOST_BYTES_PER_S)
    # On the trainer's machine it maps them.
    assert planned("vllm", "8xH100-80GB").sync_s == pytest.approx(2 * size / HOST_BYTES_PER_S)


def test_servers_take_buckets_by_the_host_s_memory_or_a_file(model: Path) -> None:
    def seconds(engine: Any, **train: Any) -> float:
        return plan(model, "2xH100-80GB", table={"engine": engine}, **train).sync_s

    size = plan(model, "2xH100-80GB").num_parameters * 2
    own = {"servers": 1}
    assert seconds({"name": "vllm", "arguments": own}) == 2 * size / HOST_BYTES_PER_S
    assert seconds({"name": "sglang", "arguments": own}) == 4 * size / HOST_BYTES_PER_S
    assert seconds({"name": "vllm", "arguments": {"urls": ["http://127.0.0.1:8000"]}}) == 4 * size / HOST_BYTES_PER_S
    # On the trainer's GPU by a copy there, in buckets.
    assert seconds({"name": "vllm", "arguments": {"servers": 1, "gpus": [[0]]}}) == size / 3350e9
    assert seconds({"name": "vllm", "arguments": own}, lora_rank=4) < size / HOST_BYTES_PER_S


def test_an_engine_for_evaluations_beside_production_needs_room_and_produces_nothing(model: Path) -> None:
    held_out = {"name": "sorting", "data": {"source": "sorting", "size": 50}, "judge": "exact_match"}
    held_out |= {"sample": {"max_tokens": 96}, "eval_data": {"source": "sorting", "start": 50, "size": 10}}
    separate = {"mode": "separate"}
    beside = {"tasks": [held_out], "produce": separate, "evaluate": {"mode": "beside", "every": 5}}
    # One more where there is one.
    one = RAY | {"num_engines": 1}
    assert plan(model, "2xH100-80GB", cluster=one, table={"produce": separate}).sync_bytes == 0
    with pytest.raises(ConfigError, match=r"2 engines with 1 each do not go on 1 x 2 GPUs"):
        plan(model, "2xH100-80GB", cluster=one, table=beside)
    # The last of several: it gets no weights when the others do.
    found, before = (
        plan(model, "4x2xH100-80GB", cluster=RAY, ranks=2, table=table) for table in (beside, {"produce": separate})
    )
    assert found.sync_bytes == before.sync_bytes / 2
    cached, shared = (each.turns["an engine's GPU"]["engine: key/value cache"] for each in (found, before))
    assert cached == 2 * shared
    # A second process on the same GPU.
    engine = {"name": "process", "arguments": {"engines": 1}}
    both = plan(model, "2xH100-80GB", table={**beside, "engine": engine})
    assert both.turns["an engine's GPU"]["engine: weights"] == 2 * 2 * both.num_parameters


@pytest.mark.parametrize(
    ("gpus", "cluster", "train", "says"),
    [
        ("2x8xH100-80GB", None, {}, r"train.ranks = 1 .* 2 x 8 GPUs: torchrun and srun .* such as train.ranks=16"),
        ("2x8xH100-80GB", None, {"ranks": 15}, r"torchrun and srun start as many on each machine"),
        ("2x2xH100-80GB", RAY, {"ranks": 4}, r"train.ranks = 4 with 1 GPUs each and 2 engines .* 2 x 2 GPUs"),
        ("2xH100-80GB", None, {"ranks": 4}, r"train.ranks = 4 with 1 GPUs each and 0 engines .* 1 x 2 GPUs"),
        ("4x2xH100-80GB", RAY | {"gpus_per_engine": 4}, {}, r"2 engines with 4 each do not go on 4 x 2 GPUs"),
        ("2x8xH100-80GB", {"num_engines": 2}, {}, r"gpus_per_trainer and gpus_per_engine"),
    ],
)
def test_parts_without_room_are_refused(
    model: Path, gpus: str, cluster: Any, train: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        plan(model, gpus, cluster=cluster, **train)


def test_ranks_of_torchrun_on_several_machines_are_planned(model: Path) -> None:
    engine = {"name": "process", "arguments": {"engines": 2}}
    found = plan(model, "2x4xH100-80GB", ranks=4, table={"engine": engine})
    # A rank holds what it holds with as many on one machine, and engines are on the first machine's free GPUs.
    one = plan(model, "8xH100-80GB", ranks=4, table={"engine": engine})
    assert found.turns == one.turns
    said = list(sentences(found))
    assert said[1].startswith("Ranks are on the GPUs 0, 1, engines on 2, 3.")
    assert not any("idle" in each for each in said)
    # A sync gathers the weights on the first machine.
    assert found.sync_bytes == found.num_parameters * 2
    assert found.sync_s > one.sync_s
    assert found.times is not None
    # Weights are gathered over both machines, as on Ray.
    assert list(found.traffic) == [1, 2]
    slow = plan(model, "2x4xH100-80GB", network=8, ranks=4, table={"engine": engine}).traffic[1]
    assert slow.weights_s == pytest.approx(found.num_parameters * 8 / 2 / 1e9 / LINK_SHARE)
    # With a rank on each GPU the engines share those of the first machine.
    full = plan(model, "2x2xH100-80GB", ranks=4, table={"engine": engine})
    assert "engine: weights" in full.turns["training"]
    assert "an engine's GPU" not in full.turns


def test_servers_on_one_gpu_share_its_rate(model: Path) -> None:
    def generation_s(gpus: list[list[int]], **more: Any) -> float:
        arguments = {"servers": len(gpus), "gpus": gpus, "memory_share": 0.3, **more}
        return plan(
            model, "4xH100-80GB", table={"engine": {"name": "vllm", "arguments": arguments}}
        ).times.generation_s

    apart, together, two_of_three = (generation_s(gpus) for gpus in ([[1], [2]], [[1], [1]], [[1], [1], [2]]))
    assert together == pytest.approx(2 * apart)
    # Three have the rate of two GPUs; each has a third of the requests, and reads all weights for them.
    assert apart / 2 < two_of_three < together


def test_an_engine_on_the_trainer_s_gpu_counts_there(model: Path) -> None:
    shared = RAY | {"num_engines": 1}
    colocated = {"produce": {"mode": "colocated"}}
    found = plan(model, "1xH100-80GB", cluster=shared, table=colocated)
    assert "engine: weights" in found.turns["training"]
    assert "an engine's GPU" not in found.turns
    assert "an engine's GPU" in plan(model, "3xH100-80GB", cluster=shared, ranks=2).turns


@pytest.mark.parametrize(("each", "servers"), [(1, 2), (2, 1)])
def test_servers_on_ray_that_share_gpus_with_ranks_are_planned_as_those_of_one_machine(
    model: Path, each: int, servers: int
) -> None:
    def planned(number: int, **more: Any) -> Any:
        own = {"servers": number, "options": [f"--tensor-parallel-size={each}"]}
        table = {"engine": {"name": "vllm", "arguments": own}, "produce": {"mode": "colocated"}}
        return plan(model, "2xH100-80GB", ranks=2, table=table, **more)

    on_ray = planned(1, cluster=RAY | {"num_engines": servers, "gpus_per_engine": each})
    here = planned(servers)
    assert list(on_ray.turns) == ["training", "syncing", "generating"]
    assert on_ray.turns == here.turns
    assert on_ray.times.step_s == pytest.approx(here.times.step_s, rel=0.05)
    assert on_ray.layout == [each for each in here.layout if "memory_share = " in each]
    # One more has GPUs of its own.
    with pytest.raises(ConfigError, match=f"{servers + 1} engines with {each} each do not go on 1 x 2 GPUs"):
        planned(1, cluster=RAY | {"num_engines": servers + 1, "gpus_per_engine": each})


# Qwen2.5-7B and Llama-3.1-70B: the run file, --gpus, kind, hidden, MLP, layers, heads, heads of keys, words.
RECIPES = {
    "7b": ("eight_gpus", "8xH100-80GB", "qwen2", 3584, 18_944, 28, 28, 4, 152_064),
    "70b": ("several_machines", "6x8xH100-80GB", "llama", 8192, 28_672, 80, 64, 8, 128_256),
}


def recipe(name: str, folder: Path, *overrides: str, num_layers: int | None = None):
    """The plan of the model, or of one with so few layers and words."""
    place, gpus, kind, hidden, mlp, layers, heads, key_heads, words = RECIPES[name]
    AutoConfig.for_model(
        kind,
        vocab_size=words if num_layers is None else 1000,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=num_layers or layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        max_position_embeddings=131_072,
        tie_word_embeddings=False,
    ).save_pretrained(folder)
    file = ROOT / "recipes" / place / f"{name}.toml"
    assert f"recipes/{place}/{name}.toml --gpus {gpus}" in PAGE
    config = load_config(RunConfig, file, [f"model.source={folder}", *overrides])
    return make_plan(config, parse_devices(gpus), prompt_tokens=512)


SERVERS_IN_PLACE = ("engine.name=vllm", "engine.arguments={servers=8}")


def test_the_run_file_for_7_b_can_be_planned(tmp_path: Path) -> None:
    found = recipe("7b", tmp_path, "batch_size=8", num_layers=2)
    assert found.fits
    assert found.times is not None
    training = found.turns["training"]
    # A rank has an eighth of the float32 weights and, as its GPU is an engine's too, all of them in bfloat16.
    assert training["trainer: weights"] == pytest.approx(found.num_parameters * 4 / 8, rel=0.01)
    assert training["engine: weights"] == found.num_parameters * 2
    assert found.sync_bytes == 0, "one machine"
    # Servers in place of processes sleep while the ranks train.
    asleep = recipe("7b", tmp_path, "batch_size=8", *SERVERS_IN_PLACE, num_layers=2)
    assert asleep.fits
    assert not any("weights" in name for name in asleep.turns["training"] if not name.startswith("trainer"))


@pytest.mark.soak
def test_the_run_file_for_7_b_fits_as_the_page_says(tmp_path: Path) -> None:
    found, asleep = recipe("7b", tmp_path), recipe("7b", tmp_path, *SERVERS_IN_PLACE)
    assert found.fits
    assert f"{found.total / GIB:.1f} of 79.2 GiB" in PAGE
    assert f"weights are gone while ranks train, {asleep.total / GIB:.1f} GiB." in PAGE


def test_the_run_file_for_70_b_can_be_planned(tmp_path: Path) -> None:
    found = recipe("70b", tmp_path, "batch_size=12", num_layers=2)
    assert found.fits
    # Each of four GPUs has a part of a server's weights, and the server takes all of its share.
    server = found.turns["an engine's GPU"]
    assert server["server: weights"] == found.num_parameters * 2 // 4
    assert list(found.traffic) == [1, 4]
    assert found.traffic[1].layers_bytes > 0
    assert found.sync_bytes == found.num_parameters * 2 * (3 + 4)


@pytest.mark.soak
def test_the_run_file_for_70_b_fits_as_the_page_says(tmp_path: Path) -> None:
    found = recipe("70b", tmp_path)
    assert found.fits
    training = sum(found.turns["training"].values()) / GIB
    assert f"{training:.1f} GiB" in PAGE
    assert f"{found.traffic[1].weights_bytes / 1e9:,.0f} GB in a step, in {found.traffic[1].weights_s:.0f} s" in PAGE
    assert f"{found.traffic[1].layers_bytes / 1e9:,.0f} GB within layers in {found.traffic[1].layers_s:.1f} s" in PAGE
    assert f"in {found.sync_s:.0f} s of a step of {found.times.step_s:.0f} s" in PAGE
