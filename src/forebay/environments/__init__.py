"""Reinforcement learning in environments: workers, a PPO trainer, and the run around them."""
