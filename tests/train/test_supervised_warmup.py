import numpy as np
import pytest
import torch

from forebay.train import WarmupConfig, supervised_warmup

EXAMPLES = [([3, 4 + i], [5 + i, 6, 2]) for i in range(10)]
CONFIG = WarmupConfig(steps=30, lr=1e-2, batch_size=4)


def test_the_loss_falls_and_progress_is_reported(model):
    seen = []
    losses = supervised_warmup(
        model, EXAMPLES, CONFIG, pad_token_id=0, on_step=lambda step, loss: seen.append((step, loss))
    )
    assert len(losses) == 30
    assert seen == list(enumerate(losses, start=1))
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) / 2


def test_the_first_loss_is_the_cross_entropy_of_response_tokens(model):
    config = WarmupConfig(steps=1, batch_size=10)
    with torch.no_grad():
        expected = torch.cat(
            [
                -model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
                .log_softmax(-1)
                .gather(1, torch.tensor(response)[:, None])
                for prompt, response in EXAMPLES
            ]
        ).mean()  # fmt: skip
    (loss,) = supervised_warmup(model, EXAMPLES, config, pad_token_id=0)
    assert loss == pytest.approx(float(expected), rel=1e-5)


def test_the_same_seed_gives_the_same_bits_and_another_does_not(make_model):
    def weights(seed):
        model = make_model()
        supervised_warmup(model, EXAMPLES, WarmupConfig(steps=5, batch_size=4), pad_token_id=0, seed=seed)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def test_a_small_token_budget_changes_memory_not_the_result(make_model):
    def losses(budget):
        config = WarmupConfig(steps=4, batch_size=8)
        return supervised_warmup(make_model(), EXAMPLES, config, pad_token_id=0, token_budget=budget)

    assert losses(12) == pytest.approx(losses(4096), rel=1e-4)


@pytest.mark.parametrize(
    ("examples", "budget", "message"),
    [
        ([], 99, "at least one group"),
        ([([], [1])], 99, "no prompt tokens"),
        ([([1], [2] * 20)], 10, "an example has 21 tokens, more than the token budget of 10"),
    ],
)
def test_examples_that_cannot_be_used_are_errors(model, examples, budget, message):
    with pytest.raises(ValueError, match=message):
        supervised_warmup(model, examples, CONFIG, pad_token_id=0, token_budget=budget)
