"""Handing the trainer's weights to engines."""
