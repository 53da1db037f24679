"""Training an agent program that talks to a chat API, without changing it.

    python examples/agent_program.py

`guess` below knows nothing of Forebay: it uses the openai client and asks until it has found a number. The
endpoint that it talks to is the model in training; what it asks and is answered is recorded token by token.
A run file names such a program like this:

    [tasks.agent]
    name = "program"
    arguments = { program = "agent_program:rollout" }        # or a command: ["python", "agent.py"]
"""

import asyncio
import random

import openai

from forebay.agents.program import ProgramAgentLoop, ProgramSession
from forebay.engines import RolloutController
from forebay.models.tiny import character_tokenizer
from forebay.testing import ScriptedEngine
from forebay.types import RolloutState, SampleParams

TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}|{{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant|{% endif %}"
)
SECRET = 4


async def guess(client: openai.AsyncOpenAI, model: str, question: str) -> int:
    """The agent: how many questions it took to find the number; 5 if it did not."""
    messages = [{"role": "user", "content": question}]
    for turn in range(1, 5):
        answer = await client.chat.completions.create(model=model, messages=messages)
        text = answer.choices[0].message.content or ""
        if text.strip() == str(SECRET):
            return turn
        hint = "higher" if text.strip() < str(SECRET) else "lower"
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": hint}]
    return 5


async def rollout(session: ProgramSession) -> float:
    """What connects the two: the reward of one run of the agent."""
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        turns = await guess(client, session.model, session.messages[-1]["content"])
    return 1.0 - (turns - 1) / 4


async def main() -> None:
    """Roll out one group on an engine that guesses at random, and show what would be trained on."""
    tokenizer = character_tokenizer("abcdefghijklmnopqrstuvwxyz0123456789 []|?MARKED")
    tokenizer.chat_template = TEMPLATE

    def random_digit(request):
        digit = random.Random(f"{request.seed}/{len(request.input_ids)}").randrange(1, 8)
        return [*tokenizer.encode(str(digit), add_special_tokens=False), tokenizer.eos_token_id]

    loop = ProgramAgentLoop(
        RolloutController(ScriptedEngine(random_digit, model_step=3)),
        None,
        tokenizer,
        sample_params=SampleParams(max_tokens=64),
        program=rollout,
    )
    question = [{"role": "user", "content": "guess my number 1 to 7"}]
    group = [RolloutState(question, rollout_id=f"g/{member}", group_id="g") for member in range(3)]
    for state in await loop.generate_group(group):
        print(state.rollout_id, state.status.value, "reward", state.reward)
        print("  saw and wrote", tokenizer.decode(state.tokens.tolist()).replace("<eos>", "]"))
        print("  trained tokens", int(state.response_mask.sum()), "of", len(state.response_ids))
    await loop.close()


if __name__ == "__main__":
    asyncio.run(main())
