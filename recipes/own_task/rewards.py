"""The reward of this task: a function of a finished rollout. `run.toml` names it as ``rewards:in_place``."""


def in_place(state):
    """The share of letters that stand where they should; `exact` is only logged."""
    truth, answer = state.reward_model["ground_truth"], state.response.strip()
    right = sum(a == b for a, b in zip(truth, answer, strict=False))
    return {"score": right / max(len(truth), len(answer)), "exact": float(answer == truth)}
