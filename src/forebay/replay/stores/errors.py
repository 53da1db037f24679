"""The errors of a replay store beside `ValueError`: a damaged row, a lost claim, rows judged too early."""


class DamagedRowError(ValueError):
    """The payload of one row is not what was stored; the other rows can be read.

    >>> DamagedRowError(17, "its checksum does not fit").uid
    17
    """

    def __init__(self, uid: int, reason: str) -> None:
        super().__init__(
            f"the payload of the row with uid {uid} is damaged ({reason}); other rows can be read, and "
            f"`storage.delete([{uid}])` removes this one"
        )
        self.uid = uid


class OwnerLost(RuntimeError):
    """Another process has taken the content over: changes by an earlier owner are refused."""


class StoreBusy(TimeoutError):
    """Another process is writing and does not come to an end; nothing was changed."""


class StepPassed(Exception):
    """Rows were judged at an older train step than their task has by now, and are to be judged again.

    >>> StepPassed(7).train_step
    7
    """

    def __init__(self, train_step: int) -> None:
        super().__init__(f"the task is at train step {train_step} already")
        self.train_step = train_step
