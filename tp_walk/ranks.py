"""Ranks of this host, started from one process: for commands that need several and weren't started by torchrun."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tp_walk.errors import WalkError


def run_ranks(world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Calls `function(*arguments)` on `world_size` ranks and returns their results in rank order.

    Each rank is a process of its own with a gloo group as `dist.group.WORLD`, and its own GPU as the current device
    where there are GPUs. `function` is a module's, its arguments and results can be pickled. When one rank fails the
    others are ended.

    Raises:
        WalkError: a rank raised, or was killed; the message has its exception or its signal (the traceback is logged).
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
        rank, failure = error.get_first_failure()
        # A rank that raised leaves a mapping with its traceback beside; one that was killed leaves a sentence.
        message = failure.message["message"] if isinstance(failure.message, dict) else failure.message
        raise WalkError(f"rank {rank} failed: {message}") from error
    return [results[rank] for rank in range(world_size)]


def _rank(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    dist.init_process_group("gloo")
    try:
        if torch.cuda.is_available():
            torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
        return function(*arguments)
    finally:
        dist.destroy_process_group()
