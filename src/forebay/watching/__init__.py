"""Watching a run: what it does now, what hangs, how busy its parts are, and a trace of its time."""
