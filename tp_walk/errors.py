"""Every error that tp_walk raises on purpose, each naming what was wrong, with which value, and what to do."""

from __future__ import annotations


class WalkError(RuntimeError):
    """Base of all tp_walk errors: `except WalkError` catches whatever the package reports.

    is_agreed: every rank has raised it, or one about the same call: ranks needn't vote on it.
    """

    is_agreed = False


class WalkInputError(WalkError, ValueError):
    """A bad argument, caught on the host before anything reached the device."""


class PlanUnavailableError(WalkError):
    """A plan that can't run here, with the reason. Raised alike on every rank."""


class CheckpointError(WalkError, ValueError):
    """A checkpoint that can't be used: names the file, the tensor, what was found and what was expected."""


class WalkTimeout(WalkError):  # noqa: N818 - a public name of the design
    """A wait for another rank ran past its deadline. The tokens of that block are the anchors."""


class WalkMismatch(WalkError):  # noqa: N818 - a public name of the design
    """Ranks were given different configurations or launches; the message names the field and both values."""


class WalkOverlap(WalkError):  # noqa: N818 - as the two above
    """Two walks of one runtime ran at once on a rank's GPU, such as two graphs replayed on two streams."""


class RuntimeClosedError(WalkError):
    """A closed runtime was used."""


class SetupError(WalkError):
    """A set-up stage failed on some rank. Every rank raises the same one, naming the rank, the stage and the cause."""


class KernelError(WalkError):
    """A kernel that can't be compiled, read or loaded; the message holds the compiler's log or the driver's status."""
