import numpy as np
import pytest
import torch
from pydantic import ValidationError

from forebay.train import WarmupConfig, learner, supervised_warmup

EXAMPLES = [([3, 4 + i], [5 + i, 6, 2]) for i in range(10)]
CONFIG = WarmupConfig(steps=30, lr=1e-2, batch_size=4)


def test_the_loss_falls_and_progress_is_reported(model):
    seen = []
    losses, _ = supervised_warmup(
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
    ((loss,), _) = supervised_warmup(model, EXAMPLES, config, pad_token_id=0)
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
        return supervised_warmup(make_model(), EXAMPLES, config, pad_token_id=0, token_budget=budget).steps

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


CONVERSATIONS = [
    ([3, 4 + i], [5 + i, 6, 2, *range(7, 9 + i % 4), 5, 2], [1, 1, 1] + [0] * (2 + i % 4) + [1, 1])
    for i in range(11)
]


def test_only_the_tokens_of_the_mask_are_trained_and_all_turns_count_as_if_alone(make_model):
    """The loss of a conversation is that of its turns, each with what came before it as its prompt."""
    turns = [
        example
        for prompt, response, mask in CONVERSATIONS
        for example in [
            (prompt, response[:3]),
            ([*prompt, *response[:3], *response[3 : 3 + mask.count(0)]], response[-2:]),
        ]
    ]
    settings = WarmupConfig(steps=1, lr=1e-9, batch_size=50)

    def loss(examples):
        return supervised_warmup(make_model(), examples, settings, pad_token_id=0).steps

    assert loss(CONVERSATIONS) == pytest.approx(loss(turns), rel=1e-6)


def test_packed_is_padded(make_model):
    config = WarmupConfig(steps="2 epochs", batch_size=4)

    def found(layout):
        losses = supervised_warmup(
            make_model(),
            CONVERSATIONS[:9],
            config,
            held_out=CONVERSATIONS[9:],
            pad_token_id=0,
            token_budget=40,
            layout=layout,
        )
        return [*losses.steps, *losses.held_out]

    assert len(found("packed")) == 2 * 3 + 2
    assert found("packed") == pytest.approx(found("padded"), abs=1e-6, rel=0)


def test_an_epoch_has_every_example_once_and_none_that_is_held_out(model, monkeypatch):
    seen = []

    def collate(batch, pack, **kwargs):
        if torch.is_grad_enabled():
            seen.append(pack.tolist())
        return whole(batch, pack, **kwargs)

    whole = learner.collate
    monkeypatch.setattr(learner, "collate", collate)
    config = WarmupConfig(steps="3 epochs", batch_size=4)
    losses, (before, after) = supervised_warmup(
        model, CONVERSATIONS[:9], config, held_out=CONVERSATIONS[9:], pad_token_id=0
    )
    assert len(losses) == len(seen) == 9
    epochs = [[row for pack in seen[start : start + 3] for row in pack] for start in (0, 3, 6)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(9))] * 3
    assert epochs[0] != epochs[1]
    assert after < before
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("steps", [0, "0 epochs", "epochs", 1.5])
def test_a_warm_up_is_as_long_as_its_steps_or_its_epochs(steps):
    with pytest.raises(ValidationError, match=r"steps"):
        WarmupConfig(steps=steps)
