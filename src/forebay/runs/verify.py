"""Proof that the engines hold the trainer's weights: the same tokens must get the same log probabilities.

::

    probe prompts --engine--> tokens, logprobs --+
                                                 +--> mean |difference| --> within the noise of the kernels?
    trainer: logprobs of the same tokens --------+                          no: WeightsDifferError

Engine and trainer rarely agree to the last bit: they pad, batch and round differently. How much that is, the
first check of each engine tells, made when both hold the model that the run started from; later ones must
not be several times worse. Right after an update with a tiny learning rate old weights can hide inside that
noise: the check finds weights that are wrong, not every weight that is one step old.
"""

import asyncio

import numpy as np

from forebay.engines import Engine, EngineLost, GenerateRequest
from forebay.train import TrainController
from forebay.types import RolloutState, SampleParams, Status

NUM_PROBES = 8
PROBE_PROMPT_TOKENS, PROBE_TOKENS = 8, 24
"""About 200 compared tokens: their mean is far steadier than the difference that other weights make."""
FIRST_LIMIT = 0.1
"""Mean |difference| that kernels and 16-bit numbers explain (0.01 is usual); other weights give over 0.3."""
GROWTH_LIMIT = 5.0
"""How much worse than the first check a later one may be."""
LEAST_LIMIT = 1e-3
"""Below it differences are rounding, also where the first check found none at all."""


class WeightsDifferError(RuntimeError):
    """An engine does not hold the trainer's weights."""


class WeightCheck:
    """Compares engines with the trainer after a hand-over.

    ::

        check = WeightCheck(vocabulary=len(tokenizer), seed=0)
        states = await check.probe(engine, model_step)
        check.compare(0, states, trainer)  # 0.0000012
    """

    def __init__(self, *, vocabulary: int, seed: int = 0) -> None:
        """`vocabulary`: probe prompts are made of the token ids below it."""
        self._prompts = np.random.default_rng(seed).integers(
            0, vocabulary, (NUM_PROBES, PROBE_PROMPT_TOKENS), dtype=np.int32
        )
        self._noise: dict[int, float] = {}

    async def probe(self, engine: Engine, number: int) -> list[RolloutState] | None:
        """`engine`'s answers to the probe prompts; one that rests is woken for it. None: it was lost.

        Raises:
            WeightsDifferError: its tokens are of several model steps, or it makes none.
        """
        try:
            states = await self._generate(engine)
            if not any(len(state.response_ids) for state in states):
                await engine.resume()
                try:
                    states = await self._generate(engine)
                finally:
                    await engine.pause()
        except EngineLost:
            return None
        steps = {int(step) for state in states for step in state.response_model_steps}
        if len(steps) != 1:
            raise WeightsDifferError(
                f"engine {number} ({type(engine).__name__}) labeled the tokens of one probe with the model "
                f"steps {sorted(steps)}"
                if steps
                else f"engine {number} ({type(engine).__name__}) generated nothing for the probe prompts: "
                f"{[state.error_msg or state.finish_reason for state in states][:2]}"
            )
        return states

    async def _generate(self, engine: Engine) -> list[RolloutState]:
        params = SampleParams(max_tokens=PROBE_TOKENS)
        requests = [
            GenerateRequest(request_id=f"probe-{i}", input_ids=prompt, params=params, max_tokens=PROBE_TOKENS, seed=i)
            for i, prompt in enumerate(self._prompts)
        ]
        outcomes = await asyncio.gather(*map(engine.generate, requests), return_exceptions=True)
        states = []
        # All of them have ended: nothing runs on unowned when one raises.
        for request, outcome in zip(requests, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                raise outcome
            if outcome.lost:
                raise EngineLost(f"the engine was lost while it answered {request.request_id}")
            state = RolloutState(
                [],
                rollout_id=request.request_id,
                prompt_ids=request.input_ids,
                response_ids=outcome.response_ids,
                logprobs=outcome.logprobs,
                response_model_steps=outcome.model_steps,
                status=Status.COMPLETED,
                sample_params=params,
                # A batch wants one of each rollout; nothing is learned from it.
                reward={"score": 0.0},
                finish_reason=outcome.finish_reason,
                error_msg=outcome.error_msg,
            )
            states.append(state)
        return states

    def compare(self, number: int, states: list[RolloutState], trainer: TrainController) -> float:
        """Mean |difference| of the log probabilities of engine `number`'s tokens; blocking.

        Raises:
            WeightsDifferError: it is more than rounding explains.
        """
        batch = trainer.pack([[state] for state in states])
        ours = trainer.compute_logprobs(batch)
        theirs, known = batch.rollout_logprobs, batch.response_mask
        difference = float(np.abs(ours - theirs)[known].mean())
        limit = FIRST_LIMIT
        if number in self._noise:
            limit = min(limit, max(LEAST_LIMIT, GROWTH_LIMIT * self._noise[number]))
        # So that NaN is refused too.
        if not difference <= limit:
            raise WeightsDifferError(
                f"engine {number} does not hold the trainer's weights of step {trainer.model_step}: the log "
                f"probabilities of its own tokens differ by {difference:.4g} on average, at most {limit:.4g} "
                f"is rounding"
            )
        self._noise.setdefault(number, difference)
        return difference
