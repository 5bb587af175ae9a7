"""Block drafting's serial Markov walk as one launch a block, over the ranks of a tensor-parallel group.

Importing this touches no GPU.
"""

from tp_walk import ops  # noqa: F401 - registers torch.ops.tp_walk.walk
from tp_walk.config import Deadline, WalkShape
from tp_walk.errors import (
    CheckpointError,
    PlanUnavailableError,
    RuntimeClosedError,
    SetupError,
    WalkError,
    WalkInputError,
    WalkMismatch,
    WalkOverlap,
    WalkTimeout,
)
from tp_walk.head import MarkovHead
from tp_walk.noise import Noise
from tp_walk.plan import Plan, WalkOutput
from tp_walk.runtime import WalkRuntime, auto_select
from tp_walk.shard import Shard

__all__ = [
    "CheckpointError",
    "Deadline",
    "MarkovHead",
    "Noise",
    "Plan",
    "PlanUnavailableError",
    "RuntimeClosedError",
    "SetupError",
    "Shard",
    "WalkError",
    "WalkInputError",
    "WalkMismatch",
    "WalkOutput",
    "WalkOverlap",
    "WalkRuntime",
    "WalkShape",
    "WalkTimeout",
    "auto_select",
]
