"""Ranks that vote: all go on, or all raise the same error. Every wait for another rank has a deadline."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from tp_walk.errors import SetupError, WalkError, WalkInputError, WalkMismatch, WalkTimeout

T = TypeVar("T")
_Error = TypeVar("_Error", bound=WalkError)

# Of the messages between two ranks, so that they don't meet the engine's own in the same group.
_TAG = 0x7470

# A message begins with one frame of this size, whatever it is: what the sender is doing, how many bytes it sends, and
# the first of them. So ranks that make different calls find out, where gloo would end the process.
_FRAME_BYTES, _LABEL_BYTES = 2048, 160
_HEAD_BYTES = _LABEL_BYTES + 8


class WalkGroup:
    """The ranks of a torch.distributed group, as tp_walk uses them; world 1 without one.

    Tensors travel on the device that the group's backend serves: NCCL takes them where they are, gloo takes copies on
    the CPU. Methods are collectives: every rank calls them, in the same order. Ranks that make different calls raise
    WalkMismatch (over gloo), and are in step again. Once a rank didn't come, all calls raise WalkTimeout at once: what
    it would have sent may still arrive, so the group is done for.

    Args:
        group: a torch.distributed process group, or None for a world of one.
        device: the runtime's device.
        timeout_s: how long the set-up calls (`all_gather_object`, `barrier`, `vote`) wait for the other ranks.

    Raises:
        WalkInputError: this process isn't in the group, or the group's backend can't serve the device.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, timeout_s: float = 300.0) -> None:
        self._group = group
        self.timeout_s = timeout_s
        self.device = device
        self.rank, self.world_size = 0, 1
        self._wire = torch.device("cpu")
        self._lost: str | None = None
        if group is None:
            return
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise WalkInputError("this process is not a member of the group given; make the runtime on its ranks only")
        backends = dict(entry.split(":") for entry in dist.get_backend_config(group).split(","))
        if backends.get(device.type) == "nccl":
            self._wire = device
        elif "cpu" not in backends:
            raise WalkInputError(
                f"the group's backends {backends} can't serve {device}; a gloo group serves any device"
            )

    def all_gather_object(self, value: Any, what: str = "all_gather_object") -> list[Any]:
        """Every rank's value (anything that pickles), in rank order. what: the call in words, the same on every rank
        up to a colon.

        Raises:
            WalkTimeout: a rank is lost, or didn't come in time. WalkMismatch: one is in the middle of another call.
        """
        if self.world_size == 1:
            return [value]
        payload = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        if self._wire.type == "cpu":
            gathered = self._exchange(payload, what, self.timeout_s)
        else:
            sizes = [int(size) for size in self._gather(torch.tensor([payload.numel()]), self.timeout_s)]
            padded = torch.zeros(max(sizes), dtype=torch.uint8)
            padded[: payload.numel()] = payload
            parts = self._gather(padded, self.timeout_s)
            gathered = [part[:size].cpu() for part, size in zip(parts, sizes, strict=True)]
        return [pickle.loads(part.numpy().tobytes()) for part in gathered]

    def barrier(self) -> None:
        """Returns once every rank has called it."""
        self.all_gather_object(None, "barrier")

    def vote(self, stage: str, error: Exception | None) -> None:
        """Ends a stage that may have failed on some rank: all ranks return, or all raise the same error.

        Raises:
            WalkError: the class is that of the failures where they share one (PlanUnavailableError, WalkInputError …),
                else SetupError. The message names the stage, and each failed rank with its cause.
        """
        if self.world_size == 1 and isinstance(error, WalkError):
            raise error
        # All votes are one call: a rank that fails votes on its stage while the others may be at one within it.
        failure = None if error is None else (_class_of(error), _cause_of(error))
        votes = self.all_gather_object((stage, failure), f"vote: {stage}")
        failed = {rank: failure for rank, (_, failure) in enumerate(votes) if failure is not None}
        if failed:
            classes = {kind for kind, _ in failed.values()}
            kind = classes.pop() if len(classes) == 1 else SetupError
            # A cause that ranks share, such as a file that none of them can read, is told once.
            ranks: dict[str, list[str]] = {}
            for rank, (_, cause) in failed.items():
                ranks.setdefault(cause, []).append(str(rank))
            causes = "; ".join(f"rank{'s' * (len(on) > 1)} {', '.join(on)}: {cause}" for cause, on in ranks.items())
            raise _agreed(kind(f"{votes[min(failed)][0]} failed on {causes}")) from error
        for rank, (theirs, _) in enumerate(votes):
            if theirs != stage:
                raise self._mismatch(stage, rank, theirs)

    def stage(self, name: str, action: Callable[[], T]) -> T:
        """Runs `action` on every rank and votes on the outcome; its result, unless a rank failed (see `vote`)."""
        try:
            result = action()
        except Exception as error:
            if isinstance(error, WalkError) and error.is_agreed:
                raise
            self.vote(name, error)
            raise AssertionError("a vote on an error returned") from error
        self.vote(name, None)
        return result

    def all_gather(self, tensor: torch.Tensor, timeout_s: float) -> torch.Tensor:
        """`[world, *shape]`: every rank's tensor (equal shapes), in rank order, on the device that it was on.

        Raises WalkTimeout when a rank is lost, or doesn't answer within timeout_s.
        """
        return torch.stack(self._gather(tensor, timeout_s)).to(tensor.device)

    def all_reduce_max(self, tensor: torch.Tensor, timeout_s: float) -> torch.Tensor:
        """The element-wise maximum over ranks of an integer tensor, on the device that it was on.

        Raises WalkTimeout when a rank is lost, or doesn't answer within timeout_s.
        """
        if self.world_size == 1:
            return tensor
        if self._wire.type == "cpu":
            return torch.stack(self._gather(tensor, timeout_s)).amax(0).to(tensor.device)
        reduced = tensor.to(self._wire, copy=True)
        self._wait(dist.all_reduce(reduced, dist.ReduceOp.MAX, group=self._group, async_op=True), timeout_s)
        return reduced.to(tensor.device)

    def all_gather_columns(self, tensor: torch.Tensor, widths: Sequence[int], timeout_s: float) -> torch.Tensor:
        """`[..., sum(widths)]` from each rank's `[..., widths[rank]]`, side by side in rank order.

        Raises WalkTimeout when a rank is lost, or doesn't answer within timeout_s.
        """
        if self.world_size == 1:
            return tensor
        padded = tensor.new_zeros(*tensor.shape[:-1], max(widths))
        padded[..., : tensor.shape[-1]] = tensor
        parts = self._gather(padded, timeout_s)
        return torch.cat([part[..., :width] for part, width in zip(parts, widths, strict=True)], -1).to(tensor.device)

    def _gather(self, tensor: torch.Tensor, timeout_s: float) -> list[torch.Tensor]:
        if self.world_size == 1:
            return [tensor]
        sent = tensor.to(self._wire).contiguous()
        if self._wire.type == "cpu":
            what = f"exchange of {list(sent.shape)} {str(sent.dtype).removeprefix('torch.')}"
            parts = self._exchange(sent.flatten().view(torch.uint8), what, timeout_s)
            return [part.view(sent.dtype).view(sent.shape) for part in parts]
        received = [torch.empty_like(sent) for _ in range(self.world_size)]
        self._wait(dist.all_gather(received, sent, group=self._group, async_op=True), timeout_s)
        return received

    def _exchange(self, payload: torch.Tensor, what: str, timeout_s: float) -> list[torch.Tensor]:
        """Every rank's bytes, in rank order. payload: `[any]` uint8 on the CPU. Raises as `all_gather_object`.

        Pair by pair: gloo's collectives can't tell which rank it was that didn't come, and where one was given up they
        hold a thread that the process then waits for at its end.
        """
        self._check_not_lost()
        until = time.monotonic() + timeout_s
        own = _message(payload, what)
        peers = [rank for rank in range(self.world_size) if rank != self.rank]
        frames = self._pass(own[:_FRAME_BYTES], dict.fromkeys(peers, _FRAME_BYTES), until, timeout_s)
        heads = {peer: _head(frame) for peer, frame in frames.items()}
        for peer, (theirs, _) in heads.items():
            # Where any two ranks differ, each rank differs from some other: all raise, and are in step again.
            if theirs.partition(":")[0] != what.partition(":")[0]:
                raise self._mismatch(what, peer, theirs)
        rests = {peer: size - _FRAME_BYTES for peer, (_, size) in heads.items() if size > _FRAME_BYTES}
        tails = self._pass(own[_FRAME_BYTES:], rests, until, timeout_s)
        messages = {peer: torch.cat([frame, tails[peer]]) if peer in tails else frame for peer, frame in frames.items()}
        sizes = {peer: size for peer, (_, size) in heads.items()}
        messages[self.rank], sizes[self.rank] = own, _HEAD_BYTES + payload.numel()
        return [messages[rank][_HEAD_BYTES : sizes[rank]].clone() for rank in range(self.world_size)]

    def _mismatch(self, own: str, peer: int, theirs: str) -> WalkMismatch:
        return _agreed(
            WalkMismatch(
                f"ranks make different calls: rank {self.rank} is at {own!r}, rank {peer} at {theirs!r}; "
                "make the same ones in the same order on every rank"
            )
        )

    def _pass(
        self, sent: torch.Tensor, sizes: Mapping[int, int], until: float, timeout_s: float
    ) -> dict[int, torch.Tensor]:
        """Sends bytes to each peer, if there are any, and receives so many from each of `sizes`."""
        received = {peer: torch.empty(size, dtype=torch.uint8) for peer, size in sizes.items()}
        works: list[tuple[int, dist.Work | None]] = []
        missing: dict[int, RuntimeError] = {}
        for peer in range(self.world_size):
            try:
                if peer in received:
                    works.append((peer, dist.irecv(received[peer], group=self._group, group_src=peer, tag=_TAG)))
                if peer != self.rank and sent.numel():
                    works.append((peer, dist.isend(sent, group=self._group, group_dst=peer, tag=_TAG)))
            except RuntimeError as error:
                missing[peer] = error
        for peer, work in works:
            assert work is not None  # as it is outside of the group alone
            try:
                work.wait(timedelta(seconds=max(1e-3, until - time.monotonic())))
            except RuntimeError as error:
                missing.setdefault(peer, error)
        if missing:
            self._give_up(f"rank {', '.join(map(str, missing))}", timeout_s, next(iter(missing.values())))
        return received

    def _wait(self, work: dist.Work, timeout_s: float) -> None:
        if torch.cuda.is_current_stream_capturing():
            work.wait()  # a host that blocks would break the capture; the wait becomes an edge of the graph
            return
        self._check_not_lost()
        try:
            work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            self._give_up(f"the other {self.world_size - 1} ranks", timeout_s, error)

    def _check_not_lost(self) -> None:
        if self._lost is not None:
            raise WalkTimeout(self._lost)

    def _give_up(self, whom: str, timeout_s: float, cause: RuntimeError) -> NoReturn:
        self._lost = f"rank {self.rank} waited {timeout_s} s at most for {whom}: {cause}"
        raise WalkTimeout(self._lost) from cause


def _agreed(error: _Error) -> _Error:
    """The error, marked as one that all ranks raise."""
    error.is_agreed = True
    return error


def _message(payload: torch.Tensor, what: str) -> torch.Tensor:
    """Head and payload; a whole frame at least."""
    head = what.encode()[:_LABEL_BYTES].ljust(_LABEL_BYTES, b"\0")
    size = _HEAD_BYTES + payload.numel()
    head += size.to_bytes(_HEAD_BYTES - _LABEL_BYTES, "little")
    message = torch.zeros(max(_FRAME_BYTES, size), dtype=torch.uint8)
    message[:_HEAD_BYTES] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    message[_HEAD_BYTES:size] = payload
    return message


def _head(frame: torch.Tensor) -> tuple[str, int]:
    """What the sender is doing, and the bytes of its message without padding."""
    head = frame[:_HEAD_BYTES].numpy().tobytes()
    label = head[:_LABEL_BYTES].rstrip(b"\0").decode(errors="replace")
    return label, int.from_bytes(head[_LABEL_BYTES:], "little")


def _class_of(error: Exception) -> type[WalkError]:
    return type(error) if isinstance(error, WalkError) else SetupError


def _cause_of(error: Exception) -> str:
    return str(error) if isinstance(error, WalkError) else f"{type(error).__name__}: {error}"
