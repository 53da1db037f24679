"""The ``forebay`` command: `commands` has those that are small or start a run; others have files of their own."""

from forebay.cli.start import main as main
