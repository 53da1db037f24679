def brevity(state, *, target):
    return 1.0 / (1 + abs(len(state.response_ids) - target))
