"""A replay buffer for other processes: the server and its client."""
