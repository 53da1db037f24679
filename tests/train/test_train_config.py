import subprocess
import sys

import pytest
from pydantic import ValidationError

from forebay.config import ConfigError, parse_config
from forebay.train import TrainConfig, WarmupConfig


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"advantage": "gae"}, "advantage 'gae' needs a critic: set critic_lr"),
        ({"critic_lr": 1e-4}, "trains a critic that advantage 'grpo' ignores"),
        ({"advantage": "pass_at_k"}, "needs pass_k"),
        ({"pass_k": 2}, "only read by advantage 'pass_at_k', not by 'grpo'"),
        ({"loss": "gspo", "dual_clip": 3.0}, "only read by loss 'clipped', not by 'gspo'"),
        ({"lora_alpha": 8.0}, "no effect without lora_rank"),
        ({"layout": "shared_prompt", "gradient_checkpointing": True}, "choose one"),
        ({"advantage": "grop"}, "unknown advantage 'grop'; did you mean 'grpo'?"),
        ({"loss": "clip"}, "unknown loss 'clip'; did you mean 'clipped'?"),
        ({"loss": "nowhere:loss"}, "cannot import 'nowhere'"),
        ({"learning_rate": 1.0}, "unknown key 'learning_rate'"),
        ({"normalisation": "batch-mean"}, "'normalisation"),
    ],
)
def test_what_does_not_fit_together_is_one_clear_error(table, message):
    with pytest.raises(ConfigError, match=r"^train: ") as error:
        parse_config(TrainConfig, table, source="train")
    assert message in str(error.value)


def test_what_the_config_says_about_a_step():
    assert not TrainConfig().needs_old_logprobs
    assert TrainConfig(mini_batches=2).needs_old_logprobs
    assert TrainConfig(epochs=2, mini_batches=3).optimiser_steps == 6
    assert TrainConfig(old_policy="rollout").needs_old_logprobs
    assert TrainConfig(advantage="gae", critic_lr=1e-4).uses_critic


def test_a_number_is_the_fixed_length_normalisation():
    assert TrainConfig(normalisation=512).normalisation == 512
    with pytest.raises(ValidationError):
        TrainConfig(normalisation=0)


def test_the_fields_stay_within_their_budget():
    assert len(TrainConfig.model_fields) + len(WarmupConfig.model_fields) <= 30


def test_importing_the_package_loads_no_torch():
    code = (
        "import sys; from forebay.train import TrainConfig, Packer, TrainBatch; TrainConfig();"
        "assert not {'torch', 'transformers', 'peft'} & set(sys.modules);"
        "from forebay.train import TrainController; assert 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unknown_name_is_an_attribute_error():
    import forebay.train

    with pytest.raises(AttributeError, match=r"'forebay\.train' has no attribute 'Trainer'"):
        _ = forebay.train.Trainer
