"""A reward model as the judge: the score of a sequence classifier, from a process of its own or a server.

::

    rollout --> messages, response --+-- process: wait for a turn --> a batch of all that wait --> model
                                     '-- server:  POST /classify, which applies its own chat template

The score is the model's one number as it is, before any sigmoid; no number is a failure, not a zero.
"""

import asyncio
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import Field

from forebay.config import ConfigError, parse_config
from forebay.judges.base import DEFAULT_TIMEOUT_S, Judge
from forebay.judges.libraries import JudgeProcesses
from forebay.judges.servers import JudgeServer, ServerArguments
from forebay.models import DEVICE_PATTERN, find_device, forgo_cudnn, load_tokenizer, precision_on, resolve_model
from forebay.types import Message, RolloutState


class RewardModelJudge(Judge):
    """Scores a conversation, the prompt's messages and the response, by a reward model with one output.

    Invariants: a conversation's score does not depend on which others are in its batch, up to rounding; a
    batch that fails, or takes longer than `timeout_s`, fails the rollouts in it, and the next one is judged
    by a new process.

    >>> judge = RewardModelJudge(model="Skywork/Skywork-Reward-V2-Qwen3-0.6B", device="cuda:1")

    Args:
        timeout_s: for one batch, or for one request.
        arguments: those of `Arguments`, by name.

    Raises:
        ConfigError: for a server aiohttp is not installed. Of a missing model the first batch tells.
    """

    class Arguments(ServerArguments, strict=True):
        """The arguments of the judge ``reward_model`` in a run file."""

        model: str
        """Named as ``model.source`` is; with `base_url`, as the server calls it."""
        base_url: str | None = None
        """Address of a server of vLLM that runs the model (``http://host:8000``); None: it runs in a process
        of its own here."""
        device: Annotated[str, Field(pattern=DEVICE_PATTERN)] = "auto"
        """Device of that process: ``cpu``, ``cuda:1``, or ``auto``."""

    def __init__(self, *, timeout_s: float | None = DEFAULT_TIMEOUT_S, **arguments: Any) -> None:
        settings = self._settings = parse_config(self.Arguments, arguments, source="judge 'reward_model'")
        # The process and the client keep the time: waits for a turn would count here.
        super().__init__(timeout_s=None)
        self._server: JudgeServer | None = None
        self._processes: JudgeProcesses | None = None
        self._timeout_s = timeout_s
        if settings.base_url is not None:
            self._server = JudgeServer(settings, judge="judge 'reward_model'", timeout_s=timeout_s)
        self._waiting: list[tuple[list[Message], asyncio.Future[float]]] = []
        self._turn = asyncio.Lock()

    async def score(self, state: RolloutState) -> float:
        """The model's output for prompt and response, on the model's own scale."""
        settings = self._settings
        messages = [*state.message, {"role": "assistant", "content": state.response}]
        if self._server is not None:
            # Numbers as they are: an activation would make 1 of the only class, or squeeze a scale.
            request = {"model": settings.model, "messages": messages, "use_activation": False}
            url = f"{(settings.base_url or '').rstrip('/')}/classify"
            return await self._server.post(url, request, _number)
        number: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting.append((messages, number))
        # Those that come in the same turn of the event loop, a group for example, are in the same batch.
        await asyncio.sleep(0)
        async with self._turn:
            # Cancelled ones that came first may fill a batch.
            while not number.done():
                await self._judge_waiting()
        return number.result()

    async def _judge_waiting(self) -> None:
        """Judge the oldest waiting requests as one batch; cancelled, it leaves the rest to the next turn."""
        batch = self._waiting[: self._settings.max_concurrent]
        try:
            if self._processes is None:
                self._processes = await asyncio.to_thread(self._make_process)
            scores = await self._processes.run([messages for messages, _ in batch])
        # Of whatever kind, it is the failure of all in the batch.
        except Exception as error:
            for _, number in batch:
                number.set_exception(error)
        else:
            for (_, number), score in zip(batch, scores, strict=True):
                number.set_result(score)
        self._waiting = self._waiting[len(batch) :]

    def _make_process(self) -> JudgeProcesses:
        """It starts with the first batch. Its model is found here, as a download has no time limit."""
        given = (str(resolve_model(self._settings.model)), self._settings.device)
        factory = f"{__name__}:make_reward_scorer"
        return JudgeProcesses(factory, self._timeout_s, 1, arguments=given, memory_bytes=0)

    async def aclose(self) -> None:
        """End the process, or close the connections to the server."""
        if self._server is not None:
            await self._server.aclose()
        if self._processes is not None:
            await asyncio.to_thread(self._processes.close)


def _number(body: Any) -> float:
    (number,) = body["data"][0]["probs"]
    return float(number)


def make_reward_scorer(model: str, device: str) -> Callable[[list[list[Message]]], list[float]]:
    """The scoring function, conversations to numbers; loads the model.

    Raises:
        ConfigError: there is no such model, or it has several outputs, or no chat template.
    """
    import torch
    from torch.nn.utils.rnn import pad_sequence
    from transformers import AutoModelForSequenceClassification

    folder, where = resolve_model(model), find_device(device)
    tokenizer = load_tokenizer(folder)
    forgo_cudnn()
    dtype = getattr(torch, precision_on(where, "auto"))
    classifier: Any = AutoModelForSequenceClassification.from_pretrained(folder, dtype=dtype).to(where).eval()
    if classifier.config.num_labels != 1 or tokenizer.chat_template is None:
        raise ConfigError(
            f"{model!r} is not a reward model of conversations: it has {classifier.config.num_labels} "
            f"outputs where one is read, or its tokenizer has no chat template"
        )

    def score(conversations: list[list[Message]]) -> list[float]:
        rows = [
            tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False) for messages in conversations
        ]
        # Decoders score the last token that is no pad: an end token that pads, too, would not be that one.
        used = set().union(*rows)
        pad = tokenizer.pad_token_id
        if pad in used:
            pad = next(token for token in range(len(used) + 1) if token not in used)
        classifier.config.get_text_config().pad_token_id = pad
        ids = pad_sequence([torch.tensor(row) for row in rows], True, pad).to(where)
        with torch.inference_mode():
            output = classifier(input_ids=ids, attention_mask=(ids != pad).long())
        numbers: list[float] = output.logits[:, 0].float().tolist()
        return numbers

    return score
