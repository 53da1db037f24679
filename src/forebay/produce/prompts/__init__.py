"""The prompt dataset: its rows, their order, and where they come from."""
