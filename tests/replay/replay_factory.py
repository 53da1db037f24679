"""Rollouts and rows for the replay tests."""

from contextlib import contextmanager

import numpy as np

from forebay.replay import StorageItem
from forebay.types import ROLLOUT_FIELDS, RolloutState, Status


def make_state(name="g", member=0, *, status=Status.COMPLETED, steps=(), num_tokens=None, **fields):
    """A rollout with a token per entry of `steps` (-1: not labeled), or `num_tokens` unlabeled ones."""
    length = len(steps) if num_tokens is None else num_tokens
    return RolloutState(
        [{"role": "user", "content": f"prompt {name}"}],
        rollout_id=f"{name}/{member}",
        group_id=name,
        prompt_ids=[1, 2, 3],
        tokens=[1, 2, 3, *range(10, 10 + length)],
        response="x" * length,
        response_ids=list(range(10, 10 + length)),
        logprobs=[-0.5] * length,
        response_model_steps=list(steps),
        reward={"score": 1.0} if status is Status.COMPLETED else None,
        status=status,
        **fields,
    )


def make_group(name="g", size=2, **fields):
    return [make_state(name, member, **fields) for member in range(size)]


def names(groups):
    """The group ids, in order."""
    return [group[0].group_id for group in groups]


def make_row(payload="payload", task="math", status="completed", *, staleness=0, step=None, tags=None, priority=1.0):
    return StorageItem(payload, -1, -1, task, status, staleness, dict(tags or {}), priority, oldest_model_step=step)


def uids(rows):
    return [row.uid for row in rows]


def same(a, b):
    """Equal in value and in type, all the way down; NaN is NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        if a.dtype.hasobject:
            return same(a.ravel().tolist(), b.ravel().tolist())
        return a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            same(x, y) for pair in zip(a.items(), b.items(), strict=True) for x, y in zip(*pair, strict=True)
        )
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, RolloutState):
        return all(same(getattr(a, name), getattr(b, name)) for name in ROLLOUT_FIELDS)
    return a == b or (a != a and b != b)


async def refusal(call):
    """The text of the ValueError that `call` ends with; None if it ends well."""
    try:
        await call
    except ValueError as error:
        message = str(error)
    else:
        return None
    assert 0 < len(message) < 1000
    return message


@contextmanager
def statements():
    """The statements that all SQL stores send, with their values: through SQLAlchemy, and past it to SQLite."""
    # Here, as the tests of other stores need no SQL.
    import sqlalchemy as sa

    from forebay.replay.stores.sql.direct import Direct

    sent, run = [], Direct.exec_driver_sql

    def note(connection, cursor, statement, values, *rest):
        sent.append((statement, values))

    def note_commit(connection):
        sent.append(("COMMIT", ()))

    def note_and_run(direct, text, values=()):
        sent.append((text, values))
        return run(direct, text, values)

    Direct.exec_driver_sql = note_and_run
    sa.event.listen(sa.Engine, "before_cursor_execute", note)
    sa.event.listen(sa.Engine, "commit", note_commit)
    try:
        yield sent
    finally:
        Direct.exec_driver_sql = run
        sa.event.remove(sa.Engine, "before_cursor_execute", note)
        sa.event.remove(sa.Engine, "commit", note_commit)
