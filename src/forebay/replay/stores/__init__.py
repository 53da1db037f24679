"""Where a replay buffer keeps its rows: the contract of a store, and the stores."""
