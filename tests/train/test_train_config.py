import math
import subprocess
import sys

import pytest
from pydantic import ValidationError

from forebay.config import ConfigError, parse_config
from forebay.train import TrainConfig, WarmupConfig, check_staleness_rule
from forebay.train.objective.corrections import CORRECTIONS


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"advantage": "gae"}, "advantage 'gae' needs a critic: set critic_lr"),
        ({"critic_lr": 1e-4}, "trains a critic that advantage 'grpo' ignores"),
        ({"advantage": "pass_at_k"}, "unknown advantage 'pass_at_k'; did you mean 'pass_at_8'?"),
        ({"advantage": "pass_at_0"}, "did you mean 'pass_at_8'?"),
        ({"loss": "gspo", "clip": (0.2, 0.2, 3.0)}, "only read by loss 'clipped', not by 'gspo'"),
        ({"kl_coef": 0.1, "kl_estimator": "reward", "advantage": "opo"}, "not read by advantage 'opo'"),
        ({"kl_coef": 0.1, "kl_estimator": "reward", "advantage": "pass_at_4"}, "by advantage 'pass_at_4'"),
        ({"clip": 1.5}, "the low clip is at most 1"),
        ({"clip": [-0.1, 0.2]}, "'clip"),
        ({"correction": "tis"}, "unknown correction 'tis'"),
        ({"correction_band": [0.5, 2.0]}, "not read by correction 'none'"),
        ({"correction": "ratio", "correction_band": [0.5, 2.0]}, "not read by correction 'ratio'"),
        ({"correction": "token_mask", "correction_band": [1.5, 2.0]}, "0 <= low <= 1 <= high"),
        ({"correction": "token_tis", "correction_band": [-1.0, 2.0]}, "0 <= low <= 1 <= high"),
        ({"guard": "halt"}, "'guard'"),
        ({"guard_bands": {"ess": 0.5}}, "'ess_token', 'ess_sequence', 'mismatch_kl' or 'clip_share'"),
        ({"guard_bands": {"mismatch_kl": 0.0}}, "greater than 0"),
        ({"lora_alpha": 8.0}, "no effect without lora_rank"),
        ({"offload_activations": True}, "set that too"),
        ({"compile": True, "layout": "shared_prompt"}, "compile goes with neither"),
        ({"moments": "cpu", "ranks": 2}, "goes with one rank"),
        ({"layout": "shared_prompt", "gradient_checkpointing": True}, "choose one"),
        ({"advantage": "grop"}, "unknown advantage 'grop'; did you mean 'grpo'?"),
        ({"loss": "clip"}, "unknown loss 'clip'; did you mean 'clipped'?"),
        ({"loss": "nowhere:loss"}, "cannot import 'nowhere'"),
        ({"learning_rate": 1.0}, "unknown key 'learning_rate'"),
        ({"normalization": "batch-mean"}, "'normalization"),
    ],
)
def test_what_does_not_fit_together_is_one_clear_error(table, message):
    with pytest.raises(ConfigError, match=r"^train: ") as error:
        parse_config(TrainConfig, table, source="train")
    assert message in str(error.value)


def test_what_the_config_says_about_a_step():
    assert not TrainConfig().needs_old_logprobs
    assert TrainConfig(mini_batches=2).needs_old_logprobs
    assert TrainConfig(epochs=2, mini_batches=3).optimizer_steps == 6
    assert TrainConfig(correction="ratio").needs_old_logprobs
    assert TrainConfig(advantage="gae", critic_lr=1e-4).uses_critic
    config = TrainConfig(clip=0.1)
    assert (config.clip_low, config.clip_high) == (0.1, 0.1)
    config = TrainConfig(clip=(0.2, 0.28))
    assert (config.clip_low, config.clip_high) == (0.2, 0.28)
    assert TrainConfig(advantage="pass_at_12").pass_k == 12
    assert TrainConfig().pass_k is None


def test_only_truncated_weights_can_come_from_the_training_pass():
    needs = {name: TrainConfig(correction=name).needs_old_logprobs for name in CORRECTIONS}
    assert {name for name, needed in needs.items() if not needed} == {
        "none",
        "token_tis",
        "sequence_tis",
        "geometric_tis",
    }
    own = TrainConfig(correction="forebay.train.objective.corrections:correct")
    assert own.needs_old_logprobs
    assert own.band == (0.0, math.inf)


def test_the_rule_correct_asks_for_a_correction():
    for rule in ("admit", "drop", "requeue", "mask"):
        check_staleness_rule(rule, TrainConfig())
    check_staleness_rule("correct", TrainConfig(correction="ratio"))
    with pytest.raises(ConfigError, match=r"train\.correction = 'none' trains them as if they were fresh"):
        check_staleness_rule("correct", TrainConfig())


def test_a_number_is_the_fixed_length_normalization():
    assert TrainConfig(normalization=512).normalization == 512
    with pytest.raises(ValidationError):
        TrainConfig(normalization=0)


def test_the_fields_stay_within_their_budget():
    assert len(TrainConfig.model_fields) + len(WarmupConfig.model_fields) <= 41


def test_importing_the_package_loads_no_torch():
    code = (
        "import sys; from forebay.train import TrainConfig, Packer, TrainBatch; TrainConfig();"
        "assert not {'torch', 'transformers', 'peft'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unknown_name_is_an_attribute_error():
    import forebay.train

    with pytest.raises(AttributeError, match=r"'forebay\.train' has no attribute 'Trainer'"):
        _ = forebay.train.Trainer
