"""Ranks of this host, started from one process: for commands that need several and weren't started by torchrun."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tp_walk.errors import WalkError


def run_ranks(world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Calls `function(*arguments)` on `world_size` ranks and returns their results in rank order.

    Each rank is a process of its own with a gloo group as `dist.group.WORLD`, and its own GPU as the current device
    where there are GPUs. `function` is a module's, its arguments and results can be pickled. When one rank fails the
    others are ended.

    Raises:
        WalkError: ranks raised, or were killed; the message names each, with its exception (tracebacks are logged) or
            signal.
    """
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world_size,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        start_method="spawn",
    )
    try:
        results = elastic_launch(config, _rank)(function, arguments)
    except ChildFailedError as error:
        # Failures carry whole seconds, so which was first isn't known: a rank that lost its peer may be among them.
        failures = sorted(error.failures.items())
        raise WalkError("; ".join(f"rank {rank} failed: {_message(failure)}" for rank, failure in failures)) from error
    return [results[rank] for rank in range(world_size)]


def _message(failure: ProcessFailure) -> str:
    # A rank that raised leaves a mapping with its traceback beside; one that was killed leaves a sentence.
    message: Any = failure.message
    return str(message["message"] if isinstance(message, dict) else message)


def _rank(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    dist.init_process_group("gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    result = function(*arguments)
    # Not after a failure: peers in the middle of a collective would see it and fail before this rank's error is told.
    dist.destroy_process_group()
    return result
