"""The critic: a value for every state, from a copy of the policy's body and a linear head.

    input_ids --body--> hidden_BLH --keep N positions--> head (starts at 0) --> values_N

It shares no weights with the policy, so neither can spoil the other's gradient. Its first values are 0.
"""

from typing import Any, Self

import torch
from torch import nn

from forebay.models import routing
from forebay.train.collate import MicroBatch
from forebay.train.model.forward import Cells, run_passes


class Critic(nn.Module):
    """Estimates the return that is still to come before each trained token.

    `body` maps ``input_ids`` and ``position_ids`` to an output with ``last_hidden_state`` (B x L x H), as the
    base models of transformers do.
    """

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.body: nn.Module = body
        parameter, hidden_size = next(body.parameters()), body.config.get_text_config().hidden_size
        self.head = nn.Linear(hidden_size, 1, device=parameter.device, dtype=parameter.dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    @classmethod
    def from_policy(cls, model: Any) -> Self:
        """A critic whose body is a copy of that of the causal language model `model` (without adapters)."""
        # The critic trains all of its body, also where weights of the policy are frozen.
        return cls(routing.copied(model.base_model).requires_grad_(True))

    def forward(self, micro: MicroBatch) -> torch.Tensor:
        """Values of the N trained tokens, float32."""

        def values_at(_: Any, cells: Cells, **inputs: Any) -> tuple[torch.Tensor, Any]:
            output = self.body(cells.input_ids, **inputs)
            states_NH = output.last_hidden_state.flatten(0, 1).index_select(0, cells.positions)
            # The body of several ranks may compute in bfloat16, without autocast.
            return self.head(states_NH.to(self.head.weight.dtype)), output.get("past_key_values")

        return run_passes(values_at, micro).float().squeeze(-1)
