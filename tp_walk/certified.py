"""Plan `certified`: which executor runs it where."""

from __future__ import annotations

from tp_walk.certified_reference import CertifiedReference
from tp_walk.errors import PlanUnavailableError
from tp_walk.plan import ExecutorContext, PlanExecutor


def certified(context: ExecutorContext) -> PlanExecutor:
    """Raises PlanUnavailableError on a GPU, for which there are no kernels yet."""
    if context.device.type == "cpu":
        return CertifiedReference(context)
    raise PlanUnavailableError("plan certified has no kernels yet")
