"""Running programs that a model wrote: limits, no network, and the whole process tree ended."""

from forebay.sandbox.isolation import CONFINED, Isolation, Limits
from forebay.sandbox.runner import Sandbox, SandboxError, SandboxResult, SandboxUnavailableError

__all__ = [
    "CONFINED",
    "Isolation",
    "Limits",
    "Sandbox",
    "SandboxError",
    "SandboxResult",
    "SandboxUnavailableError",
]
