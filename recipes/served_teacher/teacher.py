"""A teacher behind a server of vLLM or SGLang: it says how likely the student's tokens are to it.

`run.toml` names the judge as ``teacher:ServedTeacher`` and the advantage as ``teacher:by_token``. The reward
of a token is log teacher - log student, of the token that was sampled, and its advantage is that reward (Lu
et al. 2025, On-Policy Distillation). Log student is the engine's.
"""

import numpy as np

from forebay.judges import Judge
from forebay.judges.base import JudgeError
from forebay.judges.servers import JudgeServer, ServerArguments


def by_token(batch, config):
    """Each token's own reward as its advantage: no sum over later tokens, no baseline."""
    return batch.token_rewards, batch.token_rewards


class ServedTeacher(Judge):
    """Pays each generated token by the teacher's log probability less the student's.

    Args:
        base_url: of the server, ``http://host:8000``.
        model: the teacher's name there; SGLang needs none.
        dialect: ``vllm`` or ``sglang``.
        max_concurrent: requests in flight.
        timeout_s: for one request.
    """

    def __init__(self, *, base_url, model="", dialect="vllm", max_concurrent=16, timeout_s=60.0):
        # The client keeps the time of each request: waits for a slot would count here.
        super().__init__(timeout_s=None)
        if dialect not in ("vllm", "sglang"):
            raise ValueError(f"dialect must be 'vllm' or 'sglang', got {dialect!r}")
        self.base_url, self.model, self.dialect = base_url.rstrip("/"), model, dialect
        limits = ServerArguments(max_concurrent=max_concurrent)
        self.server = JudgeServer(limits, judge="judge 'teacher:ServedTeacher'", timeout_s=timeout_s)

    async def score(self, state):
        """The sum over the tokens, and the part of each."""
        temperature = 1.0 if state.sample_params is None else state.sample_params.temperature
        if temperature != 1.0:
            raise JudgeError(f"the teacher answers at temperature 1, and this was sampled at {temperature}")
        prompt, response = state.prompt_ids.tolist(), state.response_ids.tolist()
        ids = prompt + response
        if self.dialect == "vllm":
            url, read = f"{self.base_url}/v1/completions", read_vllm
            # One token has to be generated; of the prompt's tokens each is listed beside the likeliest.
            request = {"model": self.model, "prompt": ids, "max_tokens": 1, "prompt_logprobs": 1}
        else:
            url, read = f"{self.base_url}/generate", read_sglang
            request = {"input_ids": ids, "sampling_params": {"max_new_tokens": 1}}
            request |= {"return_logprob": True, "logprob_start_len": 0}
        taught = await self.server.post(url, request, lambda body: read(body, ids))
        gaps = np.array(taught[len(prompt) :]) - state.logprobs
        made = np.flatnonzero(state.response_mask)
        pairs = [(int(place) + 1, float(gaps[place])) for place in made]
        return {"score": float(gaps[made].sum()), "turn_rewards": pairs}

    async def aclose(self):
        """Close the connections."""
        await self.server.aclose()


def read_vllm(body, ids):
    """The log probability of each of `ids`; of the first there is none."""
    listed = body["choices"][0]["prompt_logprobs"]
    if len(listed) != len(ids):
        raise ValueError("it is of another prompt")
    return [0.0] + [each[str(token)]["logprob"] for each, token in zip(listed[1:], ids[1:], strict=True)]


def read_sglang(body, ids):
    """The same, from entries of (log probability, token, text)."""
    listed = body["meta_info"]["input_token_logprobs"]
    if [entry[1] for entry in listed] != ids:
        raise ValueError("it is of another prompt")
    return [0.0] + [entry[0] for entry in listed[1:]]
