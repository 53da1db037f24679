"""Running programs that a model wrote: limits, no network, and the whole process tree ended."""

from forebay.sandbox.isolation import CONFINED as CONFINED
from forebay.sandbox.isolation import Isolation as Isolation
from forebay.sandbox.isolation import Limits as Limits
from forebay.sandbox.runner import Sandbox as Sandbox
from forebay.sandbox.runner import SandboxError as SandboxError
from forebay.sandbox.runner import SandboxResult as SandboxResult
from forebay.sandbox.runner import SandboxUnavailableError as SandboxUnavailableError
