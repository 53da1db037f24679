import numpy as np
import pytest
import torch
from pydantic import ValidationError

from forebay.train import TrainConfig, TrainController, WarmupConfig, supervised_warmup
from forebay.train.optimization import Optimizer

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
        return supervised_warmup(
            make_model(), EXAMPLES, config, pad_token_id=0, train=TrainConfig(token_budget=budget)
        )[0]

    assert losses(12) == pytest.approx(losses(4096), rel=1e-4)


@pytest.mark.parametrize(
    ("examples", "budget", "message"),
    [
        ([], 99, "at least one group"),
        ([([], [1])], 99, "no prompt tokens"),
        ([([1], [2] * 20)], 10, "21 tokens, more than the token budget of 10"),
    ],
)
def test_examples_that_cannot_be_used_are_errors(model, examples, budget, message):
    with pytest.raises(ValueError, match=message):
        supervised_warmup(model, examples, CONFIG, pad_token_id=0, train=TrainConfig(token_budget=budget))


CONVERSATIONS = [
    ([3, 4 + i], [5 + i, 6, 2, *range(7, 9 + i % 4), 5, 2], [1, 1, 1] + [0] * (2 + i % 4) + [1, 1]) for i in range(11)
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
        return supervised_warmup(make_model(), examples, settings, pad_token_id=0)[0]

    assert loss(CONVERSATIONS) == pytest.approx(loss(turns), rel=1e-6)


@pytest.fixture
def gradients(monkeypatch):
    """The gradient of each optimizer step."""
    seen = []
    step = Optimizer.step

    def recording(optimizer, train_step):
        seen.append(torch.cat([weight.grad.flatten() for weight in optimizer.model.parameters()]))
        return step(optimizer, train_step)

    monkeypatch.setattr(Optimizer, "step", recording)
    return seen


def test_the_gradient_is_that_of_labels_on_the_assistants_tokens(make_model, gradients):
    """Packed as padded, and both as the model's own loss with labels on the tokens of the mask alone."""
    config = WarmupConfig(steps=1, batch_size=50)
    found = {}
    for layout in ("packed", "padded"):
        train = TrainConfig(token_budget=40, layout=layout)
        ((found[layout],), _) = supervised_warmup(make_model(), CONVERSATIONS, config, pad_token_id=0, train=train)
    model, num_tokens = make_model(), sum(sum(mask) for _, _, mask in CONVERSATIONS)
    expected = 0.0
    for prompt, response, mask in CONVERSATIONS:
        labels = [-100] * len(prompt) + [token if kept else -100 for token, kept in zip(response, mask, strict=True)]
        mean = model(torch.tensor([[*prompt, *response]]), labels=torch.tensor([labels])).loss
        part = mean * sum(mask) / num_tokens
        part.backward()
        expected += part.item()
    gradient = torch.cat([weight.grad.flatten() for weight in model.parameters()])
    assert found["packed"] == pytest.approx(expected, abs=1e-6, rel=0)
    assert found["padded"] == pytest.approx(expected, abs=1e-6, rel=0)
    assert gradient.norm() > 0.1
    for one in gradients:
        torch.testing.assert_close(one, gradient, atol=1e-6, rtol=0)


def test_an_epoch_has_every_example_once_and_none_that_is_held_out(model, monkeypatch):
    seen = []
    train = TrainController.train

    def recording(trainer, batch):
        seen.append(batch.input_ids[np.cumsum(batch.lengths) - batch.lengths + 1] - 4)
        return train(trainer, batch)

    monkeypatch.setattr(TrainController, "train", recording)
    config = WarmupConfig(steps="3 epochs", batch_size=4)
    losses, unseen = supervised_warmup(model, CONVERSATIONS[:9], config, held_out=CONVERSATIONS[9:], pad_token_id=0)
    assert len(losses) == len(seen) == 9
    epochs = [np.concatenate(seen[start : start + 3]).tolist() for start in (0, 3, 6)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(9))] * 3
    assert epochs[0] != epochs[1]
    assert len(unseen) == 4
    assert unseen[-1] < unseen[0]
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("steps", [0, "0 epochs", "epochs", 1.5])
def test_a_warm_up_is_as_long_as_its_steps_or_its_epochs(steps):
    with pytest.raises(ValidationError, match=r"steps"):
        WarmupConfig(steps=steps)
