"""Whether an inference server is set up as training needs it, found out by asking it.

::

    check_context(link, ...)      the model it serves, and of how many tokens
    probe_request --> one token --> check_probe(link, ...)     whether its log probability is that of the draw

It changes nothing at the server. Sending the probe is the engine's, which reads answers anyway.
"""

from __future__ import annotations

import numpy as np

from forebay.engines.base import Completion, GenerateRequest
from forebay.engines.servers.dialects import Dialect
from forebay.engines.servers.link import ServerFailed, ServerLink

_CERTAIN = -1e-3
"""Log probability of what is certain, but for rounding."""


async def check_context(link: ServerLink, model: str, max_context_tokens: int) -> None:
    """Raise unless the server serves `model`, and takes `max_context_tokens` of it.

    Raises:
        ServerFailed: see above.
        EngineLost: it does not answer.
    """
    served = (await link.do([link.dialect.models])).get("data")
    contexts = {entry.get("id"): entry.get("max_model_len") for entry in served or ()}
    if model not in contexts:
        raise ServerFailed(f"{link} does not serve the model {model!r}, but {list(contexts)}")
    if (context := contexts[model]) is not None and context < max_context_tokens:
        raise ServerFailed(
            f"{link} takes {context} tokens, but the run needs {max_context_tokens}: start it with as many"
        )


def probe_request(dialect: Dialect) -> GenerateRequest:
    """A request for one token, which every server can make."""
    return GenerateRequest(
        request_id="probe", input_ids=np.zeros(1, np.int32), params=dialect.probe, max_tokens=1, seed=0
    )


def check_probe(link: ServerLink, completion: Completion) -> None:
    """Raise unless `completion` is what `probe_request` should give.

    Raises:
        ServerFailed: the server reports other log probabilities than those that it draws from, or no token.
    """
    logprobs, dialect = completion.logprobs, link.dialect
    if len(logprobs) != 1:
        raise ServerFailed(f"{link} made {len(logprobs)} tokens where 1 was asked for; {dialect.help}")
    if dialect.probe_is_certain and not logprobs[0] > _CERTAIN:
        raise ServerFailed(
            f"{link} does not report the log probabilities of what it draws from (a certain token has "
            f"{logprobs[0]:.3f}, not 0); {dialect.help}"
        )
