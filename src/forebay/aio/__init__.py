"""Asyncio pieces that know no rollouts: fair gates, wake-ups, cancellation, time limits, virtual time."""
