"""Workers as threads of the trainer's process: quick to start, but they share one interpreter with it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading

from forebay.environments.workers.messages import Answering, Orders, Report, WorkerDied, WorkerSpec
from forebay.environments.workers.worker import work


class ThreadLink:
    """A thread's way to the hub on another thread's event loop.

    >>> orders = ThreadLink(loop, hub).report(Report("worker-0", version=-1))  # in a thread
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, hub: Answering) -> None:
        self._loop, self._hub = loop, hub

    def report(self, report: Report) -> Orders:
        """See `Link`."""
        if self._loop.is_closed():
            raise EOFError("the trainer is gone: its event loop is closed")
        try:
            return asyncio.run_coroutine_threadsafe(self._hub.answer(report), self._loop).result()
        except concurrent.futures.CancelledError:
            raise EOFError("the trainer is gone: its event loop has ended") from None


class ThreadWorkers:
    """See `WorkerMode`. A thread cannot be ended from outside: one whose run is cancelled ends by itself,
    with its next report.

    >>> await ThreadWorkers().run(spec, hub)
    """

    async def run(self, spec: WorkerSpec, hub: Answering) -> None:
        """See `WorkerMode`."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[BaseException | None] = loop.create_future()
        link = _Cancellable(ThreadLink(loop, hub))

        def tell(error: BaseException | None) -> None:
            if not ended.done():
                ended.set_result(error)

        def target() -> None:
            error = None
            try:
                work(spec, link)
            except Exception as raised:  # whatever the environment raises, it is this worker's end only
                error = raised
            if not loop.is_closed():
                loop.call_soon_threadsafe(tell, error)

        # A daemon: an environment that hangs must not keep the program from ending.
        threading.Thread(target=target, name=spec.worker_uuid, daemon=True).start()
        try:
            error = await ended
        finally:
            link.cancelled = True
        if error is not None:
            raise WorkerDied(f"{type(error).__name__}: {error}") from error


class _Cancellable:
    def __init__(self, link: ThreadLink) -> None:
        self.cancelled = False
        self._link = link

    def report(self, report: Report) -> Orders:
        return Orders(True, -1, b"") if self.cancelled else self._link.report(report)
