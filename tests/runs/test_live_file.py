"""The live file: an error of one look at the run does not end it."""

import asyncio
import json

from forebay.runs.record import live
from forebay.runs.record.live import LiveFile


async def test_a_look_that_fails_is_logged_once_and_the_next_one_is_written(tmp_path, monkeypatch, caplog):
    looks = 0

    class Status:
        async def count_buffer(self):
            nonlocal looks
            looks += 1
            if looks < 3:
                raise RuntimeError("the store does not answer")

    monkeypatch.setattr(live, "PERIOD_S", 0.01)
    monkeypatch.setattr(live, "MAX_CPU_SHARE", 1.0)
    written = LiveFile(tmp_path, lambda: {"train_step": 7}, dict, Status().count_buffer)
    async with asyncio.timeout(300):
        while not (tmp_path / "live.json").exists():
            await asyncio.sleep(0.01)
    assert json.loads((tmp_path / "live.json").read_text())["state"] == "running"
    assert caplog.text.count("could not be written, and will be tried again") == 1
    written.close("finished")
    assert json.loads((tmp_path / "live.json").read_text())["state"] == "finished"
