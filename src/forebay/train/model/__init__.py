"""Passes through a model: forward, output head, critic, LoRA."""
