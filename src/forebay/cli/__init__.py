"""The ``forebay`` command: one file for each command."""

from forebay.cli.commands import app, main

__all__ = ["app", "main"]
