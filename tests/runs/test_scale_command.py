"""The socket by which ``forebay scale`` reaches a run: for the run's user alone, in a folder of any depth."""

import asyncio
import os
import sys

import pytest

from forebay.config import ConfigError
from forebay.runs.show.surroundings import ask_to_scale, scaled_by_command


async def echo(change):
    return f"told {change}"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the path is relative, which may be too long")
def test_the_command_reaches_a_run_in_a_deep_folder_and_no_other_user_does(tmp_path):
    folder = tmp_path / ("deep" * 40)
    folder.mkdir()
    opened = len(os.listdir("/proc/self/fd"))

    async def main():
        async with scaled_by_command(folder, echo):
            mode = (folder / "control.sock").stat().st_mode & 0o777
            return mode, await asyncio.to_thread(ask_to_scale, folder, "engines=+1")

    before = os.umask(0o002)
    try:
        # The second finds what is left of a run that was killed.
        assert asyncio.run(main()) == (0o600, "told engines=+1")
        os.mknod(folder / "control.sock", 0o140600)
        assert asyncio.run(main()) == (0o600, "told engines=+1")
    finally:
        os.umask(before)
    assert not list(folder.iterdir())
    assert len(os.listdir("/proc/self/fd")) == opened
    with pytest.raises(ConfigError, match="no run works in"):
        ask_to_scale(folder, "engines=+1")


def test_a_run_that_the_command_cannot_reach_says_so_and_goes_on(tmp_path, caplog):
    (tmp_path / "control.sock").write_text("a file of the user's own")

    async def main():
        async with scaled_by_command(tmp_path, echo):
            return (tmp_path / "control.sock").read_text()

    with caplog.at_level("INFO"):
        assert asyncio.run(main()) == "a file of the user's own"
    assert "forebay scale will not reach this run" in caplog.text
