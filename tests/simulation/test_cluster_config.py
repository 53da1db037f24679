import pytest

from forebay.config import ConfigError, load_config, parse_config
from forebay.simulation import ClusterConfig, LengthConfig
from forebay.simulation.cluster import changed_cluster

TABLE = {"slots": 4, "tokens_per_s": 100.0, "train_s": 2.0, "lengths": {"constant": 10}}


def test_rates_grow_with_the_requests_up_to_the_full_rate():
    even = ClusterConfig(**TABLE)
    assert [even.decode_rate(n) for n in (1, 2, 4)] == [25, 50, 100]
    fast_alone = ClusterConfig(**{**TABLE, "tokens_per_s": [(2, 80)]})
    assert [fast_alone.decode_rate(n) for n in (1, 2, 4)] == [40, 80, 80]
    measured = ClusterConfig(**{**TABLE, "tokens_per_s": [(2, 60), (4, 100)]}, engines=3)
    assert [measured.decode_rate(n) for n in (1, 2, 3, 4)] == [30, 60, 80, 100]
    assert measured.generation_s(num_tokens=300) == 1
    assert measured.generation_s(600) == 2


def test_lengths_are_constant_measured_or_log_normal():
    assert LengthConfig(constant=7).quantile(0.3) == 7
    assert [LengthConfig(values=[3, 1, 2]).quantile(share) for share in (0.01, 0.5, 0.99)] == [1, 2, 3]
    tailed = LengthConfig(p50=500, p99=4000)
    assert [tailed.quantile(share) for share in (0.5, 0.99)] == [500, 4000]


def test_a_split_shares_the_devices_out_anew():
    cluster = ClusterConfig(**{**TABLE, "train_tokens_per_s": 10.0}, engines=2, trainers=2)
    assert cluster.training_s(20) == 4
    other = cluster.split(3, 1)
    assert (other.engines, other.trainers, other.training_s(20)) == (3, 1, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": {}}, "in one way"),
        ({"lengths": {"p50": 5}}, "p50 <= p99"),
        ({"lengths": {"p50": 5, "p99": 4}}, "p50 <= p99"),
        ({"lengths": {"constant": 1, "values": [1]}}, "in one way"),
        ({"lengths": {"values": [4, 0]}}, "lengths.values.1' = 0: Input should be greater than 0"),
        ({"tokens_per_s": [(4, 10), (2, 20)]}, "rising order"),
        ({"tokens_per_s": [(0, 10)]}, "must be positive"),
        ({"train_s": 0}, "takes no time"),
        ({"engine": 2}, "did you mean 'engines'"),
    ],
)
def test_what_does_not_fit_is_said(change, message):
    with pytest.raises(ConfigError, match=message):
        parse_config(ClusterConfig, {**TABLE, **change})


def test_the_example_and_overrides_are_read(tmp_path):
    from pathlib import Path

    example = Path(__file__).parents[2] / "recipes" / "clusters" / "example.toml"
    cluster = load_config(ClusterConfig, example, ["engines=8", "lengths.p99=9000"])
    assert (cluster.engines, cluster.lengths.p99) == (8, 9000)
    assert changed_cluster(cluster, ["sync_s=1.5"]).sync_s == 1.5
    with pytest.raises(ConfigError, match="no file at"):
        load_config(ClusterConfig, tmp_path / "missing.toml")
