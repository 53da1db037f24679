import torch

from forebay.engines import RolloutController, ScriptedEngine
from forebay.models import ModelConfig, load_model, load_tokenizer, resolve_model
from forebay.types import RolloutState, Status

torch.set_num_threads(1)
_config = ModelConfig.model_validate(
    {"source": "tiny", "max_context": 32, "tiny": {"hidden_size": 32, "num_layers": 1}}
)
_folder = resolve_model(_config, seed=0)
model, tokenizer = load_model(_folder), load_tokenizer(_folder)


def _rollout(group, member):
    return RolloutState(
        [{"role": "user", "content": "1+1="}],
        rollout_id=f"{group}/{member}",
        group_id=f"{group}",
        prompt_ids=[3, 4, 5],
        response_ids=[6, 7 + member],
        logprobs=[-1.0, -1.5],
        response_model_steps=[0, 0],
        reward={"score": float(member)},
        status=Status.COMPLETED,
    )


groups = [[_rollout(group, member) for member in range(2)] for group in range(2)]
rollout_controller = RolloutController(ScriptedEngine([7]))
