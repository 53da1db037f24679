"""The numbers of reinforcement learning: advantages, losses, corrections, normalization."""
