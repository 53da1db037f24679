"""Environments that answer the model between its turns."""
