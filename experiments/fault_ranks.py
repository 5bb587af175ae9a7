"""Ranks that may die: processes that live one case after another, under an outer limit, with a substitute at hand.

A rank that is to be lost says so first ("fault"), so that the others' reports can be timed from there. One that stops
itself is resumed, late, once the others have reported.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Where torch and this package are imported once; each rank is a fork of that, from before CUDA was touched.
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["torch", "torch.distributed", "tp_walk"])

Live = Callable[["Life", Any], Any]


class Life:
    """What a rank knows while it lives a case. `fault` tells the parent of what comes next."""

    def __init__(self, rank: int, world_size: int, pipe: Connection) -> None:
        self.rank, self.world_size = rank, world_size
        self._pipe = pipe

    def fault(self) -> None:
        """A fault begins now."""
        self._pipe.send(("fault", time.monotonic()))

    def kill(self) -> None:
        self.fault()
        os.kill(os.getpid(), signal.SIGKILL)

    def stop(self) -> None:
        """Returns once the others have reported: at their end, or when one asks for it."""
        self.fault()
        os.kill(os.getpid(), signal.SIGSTOP)

    def resume_victim(self) -> None:
        """This rank has reported, and needs the stopped one again."""
        self._pipe.send(("resume", None))


@dataclass
class Run:
    """How a case went. faulted_at: seconds on the clock that all processes of a machine share; None if nobody said.

    results: by rank, what `live` returned; None for a rank that was lost. hung: those that gave nothing in time.
    resumes: a rank has asked for the stopped one.
    """

    faulted_at: float | None = None
    resumes: bool = False
    results: list[Any] = field(default_factory=list)
    hung: list[int] = field(default_factory=list)


class _Rank:
    def __init__(self, rank: int, prepare: Callable[[int], None]) -> None:
        self.pipe, theirs = _SERVER.Pipe()
        self.process = _SERVER.Process(target=_serve, args=(theirs, rank, prepare), daemon=True)
        self.process.start()
        theirs.close()

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


class Ranks:
    """`world_size` ranks of which rank `victim` may be lost: it has `substitutes` waiting.

    prepare: called first in every process, with its rank: what takes long and needn't be a part of a case.
    """

    def __init__(
        self, world_size: int, prepare: Callable[[int], None], *, victim: int = 1, substitutes: int = 1
    ) -> None:
        self._prepare = prepare
        self._victim = victim
        self._ranks = [_Rank(rank, prepare) for rank in range(world_size)]
        self._substitutes = [_Rank(victim, prepare) for _ in range(substitutes)]

    def run(self, live: Live, case: Any, limit_s: float) -> Run:
        """`live(life, case)` on every rank, in a gloo group of their own. A rank without an answer after limit_s is
        killed, and so is one that raises: `live` reports what it expects.

        Raises:
            AssertionError: `live` raised; the message is what.
        """
        run = Run(results=[None] * len(self._ranks))
        with tempfile.TemporaryDirectory() as folder:
            store = Path(folder, "store").as_uri()
            for rank in self._ranks:
                rank.pipe.send((live, case, store, len(self._ranks)))
            waiting, until, raised = set(range(len(self._ranks))), time.monotonic() + limit_s, ""
            while waiting and time.monotonic() < until:
                for number in list(waiting):
                    raised += self._hear(number, waiting, run)
                if waiting == {self._victim} or run.resumes:
                    self._resume()
        run.hung = sorted(waiting)
        for number in waiting:
            self._replace(number)
        if raised:
            raise AssertionError(raised)
        return run

    def close(self) -> None:
        for rank in self._ranks + self._substitutes:
            rank.end()

    def _hear(self, number: int, waiting: set[int], run: Run) -> str:
        """Takes one message of a rank, if there is one; what it raised, if it did."""
        rank = self._ranks[number]
        if not rank.pipe.poll(0.005):
            return ""
        try:
            kind, value = rank.pipe.recv()
        except (EOFError, ConnectionResetError):  # it was killed
            waiting.remove(number)
            self._replace(number)
            return ""
        if kind == "fault":
            run.faulted_at = value
            return ""
        if kind == "resume":
            run.resumes = True
            return ""
        waiting.remove(number)
        if kind == "raised":
            self._replace(number)
            return f"rank {number}: {value}\n"
        run.results[number] = value
        return ""

    def _resume(self) -> None:
        pid = self._ranks[self._victim].process.pid
        if _is_stopped(pid):
            os.kill(pid or 0, signal.SIGCONT)

    def _replace(self, number: int) -> None:
        self._ranks[number].end()
        if number == self._victim and self._substitutes:
            self._ranks[number] = self._substitutes.pop(0)
            self._substitutes.append(_Rank(number, self._prepare))
        else:
            self._ranks[number] = _Rank(number, self._prepare)


def _is_stopped(pid: int | None) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:  # killed, and nobody has told yet
        return False
    return stat.rpartition(")")[2].split()[0] == "T"


def _serve(pipe: Connection, rank: int, prepare: Callable[[int], None]) -> None:
    torch.set_num_threads(1)
    prepare(rank)
    while True:
        try:
            live, case, store, world_size = pipe.recv()
        except EOFError:
            return
        try:
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
            dist.barrier()  # or a rank that ends at once would break the connections of one that still makes them
            try:
                result = live(Life(rank, world_size, pipe), case)
            finally:
                dist.destroy_process_group()
            pipe.send(("result", result))
        except Exception as error:
            pipe.send(("raised", repr(error)))
