"""How a model is shared out over ranks, as the ``[train.parallel]`` table of a run file; needs no torch."""

from typing import Annotated, Literal

from pydantic import Field

from forebay.config import ConfigError, StrictModel


class ParallelConfig(StrictModel):
    """How a model and its batches are shared out over the ranks of a trainer (FSDP2 and tensor parallelism).

    The other ranks hold slices: ``ranks = replicas x slices x tensor``; `context` divides the slices.

    >>> ParallelConfig(tensor=2).check(8)
    """

    tensor: Annotated[int, Field(ge=1)] | Literal["experts"] = 1
    """Ranks that compute every layer together, by the plan that transformers has for the model; they see the
    same sequences, and talk in every layer: within one machine. ``experts`` of a mixture: whole ones on each
    of the ranks that hold slices, to which tokens travel."""
    context: int = Field(default=1, ge=1)
    """Ranks that share out the tokens of each sequence, for rollouts longer than one rank holds; they talk in
    every layer. ``token_budget`` counts the tokens of all of them together."""
    replicas: int = Field(default=1, ge=1)
    """Copies of the slices: with as many as machines, weights are gathered within a machine, and only
    gradients cross (hybrid sharding)."""

    offload: bool = False
    """Slices, gradients and moments lie in the CPU's memory, and the optimizer computes there."""

    @property
    def num_tensor(self) -> int:
        """Ranks that compute every layer together."""
        return 1 if self.tensor == "experts" else self.tensor

    @property
    def same_sequences(self) -> int:
        """Ranks with neighboring numbers that see the same sequences."""
        return self.context * self.num_tensor

    def check(self, num_ranks: int) -> None:
        """Refuse a number of ranks that cannot be shared out so.

        Raises:
            ConfigError: it is no multiple of ``tensor x context x replicas``.
        """
        if num_ranks % (self.same_sequences * self.replicas):
            raise ConfigError(
                f"{num_ranks} ranks cannot be {self.replicas} replicas of ranks in groups of "
                f"{self.same_sequences}; make train.ranks a multiple of parallel.tensor x parallel.context x "
                f"parallel.replicas"
            )

    def check_images(self) -> None:
        """Refuse data with images where ranks share out the tokens of a sequence.

        Raises:
            ConfigError: they do.
        """
        if self.context > 1:
            raise ConfigError(
                "the data has images, whose placeholders ranks cannot share out: set train.parallel.context to 1"
            )
