"""Ranks for tests: processes with a gloo group that stay alive from test to test, under an outer time limit."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

# Far above what any test needs: a pool that reaches it hangs.
OUTER_LIMIT_S = 180.0


class RankPool:
    """`pool(function, *arguments)` calls a module's function on every rank and returns the results in rank order.

    Ranks find their group as `dist.group.WORLD`. A rank that raises makes the call raise, with its traceback. After a
    hang the ranks are killed and the pool is done for. environments: by rank, what its environment has besides.
    """

    def __init__(self, world_size: int, environments: Sequence[Mapping[str, str]] = ()) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        store = Path(self._folder.name) / "store"
        self._pipes: list[Connection] = []
        self.processes = []
        for rank in range(world_size):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=_serve, args=(theirs, store.as_uri(), rank, world_size), daemon=True)
            with mock.patch.dict(os.environ, environments[rank] if environments else {}):
                process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((function, arguments))
        limit = time.monotonic() + OUTER_LIMIT_S
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(max(0.0, limit - time.monotonic())):
                self.close()
                raise AssertionError(f"rank {rank} gave no answer within {OUTER_LIMIT_S} s")
            answers.append(pipe.recv())
        for rank, (result, trace) in enumerate(answers):
            if trace is not None:
                raise AssertionError(f"rank {rank} raised {result!r}\n{trace}")
        return [result for result, _ in answers]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()


def outcome(function: Callable[[], Any]) -> Any:
    """The function's result, or the exception that it raised: for tests of what each rank sees."""
    try:
        return function()
    except Exception as error:
        return error


def _serve(pipe: Connection, init_method: str, rank: int, world_size: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size)
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((function(*arguments), None))
        except Exception as error:
            pipe.send((repr(error), traceback.format_exc()))
