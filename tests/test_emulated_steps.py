"""Builds that lack a part still end, on the CPU: nobody waits for what is left out, and ranks agree on the tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import kernel_variants
import pytest
import steps
import torch
from emulated import HAS_COMPILER, run_kernel
from emulated_ranks import Captured, EmulatedLaunch, Gpu, HostDevice, ThreadGroup, emulate_runtimes
from emulated_ranks import Ranks as EmulatedRanks
from kernel_variants import EXCHANGE, LEFT_OUT, NOISE, ROWS, STEPS, W2

from tp_walk import Deadline, MarkovHead, executors, jit, kernels
from tp_walk.errors import KernelError
from tp_walk.mailbox import MailboxLayout
from tp_walk.noise import Noise
from tp_walk.plan import WalkInputs
from tp_walk.precompile import HOPPER, Target
from tp_walk.quantize import quantize_rows
from tp_walk.shard import shard_bounds
from tp_walk.status import STATUS_BYTES
from tp_walk.workload import Ranks

T = TypeVar("T")

pytestmark = pytest.mark.skipif(not HAS_COMPILER, reason="needs g++")

WORLD, GRID, GAMMA = 2, 3, 3
# Of 20 tiles a CTA has 4 in shared memory; the last one of each rank has 18, and so branches that others don't take.
VOCAB_SIZE = WORLD * (GRID * 20 - 2) * 16
# int8, which a rank walks alone: of 44 tiles 12, so that some warps have one more than others.
INT8_VOCAB_SIZE = (GRID * 44 - 2) * 16
DEADLINE_NS = 60 * 10**9


@pytest.mark.parametrize(
    ("plan", "name", "batch", "sampled"),
    [
        *(("tp_bf16", name, 1, True) for name in LEFT_OUT),
        ("tp_bf16", ROWS, 1, False),
        ("tp_bf16", W2, 1, False),
        ("tp_bf16", EXCHANGE, 6, True),
        ("tp_bf16", STEPS, 6, False),
        ("tp_bf16", ROWS, 20, True),
        ("tp_bf16", EXCHANGE, 20, False),
        *(("int8", name, 1, True) for name in LEFT_OUT),
        *(("int8", name, 1, False) for name in LEFT_OUT if name != NOISE),
    ],
)
def test_a_build_without_a_part_ends(
    plan: str, name: str, batch: int, sampled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    int8 = plan == "int8"
    world, vocab_size = (1, INT8_VOCAB_SIZE) if int8 else (WORLD, VOCAB_SIZE)
    (one,) = (
        one
        for one in steps.timed_specialisations(
            int8=int8,
            markov_rank=256,
            rows=vocab_size // world,
            world_size=world,
            max_batch=batch,
            rounding="engine",
            num_sms=GRID,
            shared_limit=HOPPER.shared_limit,
        )
        if one.sampled == sampled
    )
    assert one.placement.smem_tiles == (12 if int8 else 4)
    torch.manual_seed(1)
    w1, w2 = (torch.randn(vocab_size, 256).mul_(0.3).bfloat16() for _ in range(2))
    u_rows, u_scales = kernels.to_plane_rows(w1) if int8 else (w1, None)
    w2_rows, row_scales = quantize_rows(w2) if int8 else (w2, None)
    # Small base logits, which don't hide a bias that isn't what it should be.
    base, anchors = torch.randn(batch, GAMMA, vocab_size).mul_(0.1).bfloat16(), torch.randint(vocab_size, (batch,))
    temperatures = torch.ones(batch) if sampled else None
    noise = Noise(11, 0) if sampled else None
    shards = shard_bounds(vocab_size, world)
    fragments = [
        kernels.to_fragments(w2_rows[shard.start : shard.stop].contiguous(), one.placement) for shard in shards
    ]
    words = MailboxLayout(world, batch, one.placement.grid).num_bytes // 8
    mailboxes, statuses = torch.zeros(world, words + 32, dtype=torch.int64), torch.zeros(world, STATUS_BYTES)
    mailboxes[:, :2] = 1  # the block to come, and the first

    drafts: list[torch.Tensor] = []
    given: list[kernels.WalkParams] = []
    for rank, shard in enumerate(shards):
        drafts.append(torch.full((batch, GAMMA), -1))
        inputs = WalkInputs(base, True, anchors, temperatures, noise, None, "none", "all", drafts[-1], None, None)
        p = kernels.WalkParams()
        p.u_rows, p.w2_fragments = u_rows.data_ptr(), fragments[rank].data_ptr()
        if u_scales is not None and row_scales is not None:
            p.u_scales, p.row_scales = u_scales.data_ptr(), row_scales.data_ptr()
        for peer in range(world):
            p.mailboxes[peer] = mailboxes[peer].data_ptr()
        p.status = statuses[rank].data_ptr()
        p.startup_deadline_ns = p.steady_deadline_ns = DEADLINE_NS
        p.vocab_size = p.target_vocab_size = vocab_size
        p.shard_start, p.shard_width, p.rank, p.shares = shard.start, shard.width, rank, 1
        executors.describe_walk(p, inputs, plan, "engine")
        executors.point_at_base(p, base, True)
        given.append(p)

    monkeypatch.setattr(jit, "csrc_dir", jit.csrc_dir)  # put back afterwards
    kernel_variants.use(name)
    for block in range(2):
        run_kernel("walk", one.macros, given, one.placement.grid, one.placement.shared_bytes, tmp_path / "emulated")
        assert not statuses.any()
        assert mailboxes[:, 0].tolist() == [block + 2] * world
        assert all(torch.equal(other, drafts[0]) for other in drafts)
    kernel_variants.use("production")
    if name == STEPS:
        assert bool((drafts[0] == -1).all())
    else:
        assert bool(((drafts[0] >= 0) & (drafts[0] < vocab_size)).all())
        assert len(drafts[0].unique()) > 1
    if name == W2 and not sampled:  # all of W2 is zero, that in shared memory, too
        assert torch.equal(base.gather(2, drafts[0][..., None])[..., 0], base.amax(2))


class NamedLaunch(EmulatedLaunch):
    """Notes what is launched; the build called `fails` can't be."""

    launched: ClassVar[list[str]] = []
    fails: ClassVar[str] = ""

    def __init__(self, what: str, kernel: tuple[str, Mapping[str, int]], **configuration: int) -> None:
        super().__init__(what, kernel, **configuration)
        self._what = what

    def __call__(self, arguments: int, stream: int) -> None:
        self.launched.append(self._what)
        if self._what == f"the walk ({self.fails})":
            raise KernelError("injected")
        super().__call__(arguments, stream)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulated")


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def builds_of(
    monkeypatch: pytest.MonkeyPatch, folder: Path, said: list[str]
) -> Callable[[str, Callable[[steps.Builds], T]], T]:
    """`builds_of(plan, action)`: what `action` makes of steps.Builds on one emulated GPU. All builds are the production
    one here, as each is walked above: this is about the host's part.
    """
    emulate_runtimes(monkeypatch)
    gpu = Gpu(GRID, HOPPER.shared_limit)
    monkeypatch.setattr(executors, "Launch", NamedLaunch)
    for name in ("Launch", "PlainLaunch"):
        monkeypatch.setattr(steps, name, NamedLaunch)
    monkeypatch.setattr(NamedLaunch, "launched", [])
    monkeypatch.setattr(kernel_variants, "use", lambda name: None)
    monkeypatch.setattr(steps, "current_gpu", lambda: Target(HOPPER.arch, gpu.num_sms, gpu.shared_limit))
    monkeypatch.setattr(steps, "CapturedWork", Captured)
    monkeypatch.setattr(steps, "DEADLINE", Deadline(60.0, 60.0))
    monkeypatch.setattr(steps, "HANG_S", 600.0)

    def run(plan: str, action: Callable[[steps.Builds], T]) -> T:
        def on_rank(rank: int) -> T:
            ranks = Ranks(HostDevice("cpu"))  # type: ignore[arg-type]
            torch.manual_seed(1)
            head = MarkovHead(*(torch.randn(VOCAB_SIZE, 256).mul_(0.3).bfloat16() for _ in range(2)))
            return action(steps.Builds(head, plan, 2, GAMMA, ranks, ThreadGroup(), said.append))

        (result,) = EmulatedRanks(1, gpu, folder / "production").each(on_rank)
        return result

    return run


@pytest.mark.parametrize(("plan", "sampled"), [("tp_bf16", True), ("int8", False)])
def test_every_build_is_walked_in_place_of_the_whole_one(
    plan: str, sampled: bool, builds_of: Callable[[str, Callable[[steps.Builds], Any]], Any], said: list[str]
) -> None:
    ready, refused = builds_of(plan, lambda builds: builds.captured(GAMMA, sampled))
    expected = [*steps.builds(sampled), steps.PLAIN]
    assert not refused
    assert list(ready) == expected
    assert [line.rpartition(": ")[2] for line in said] == [repr(name) for name in expected]
    # Once by itself, once captured.
    assert NamedLaunch.launched == [f"the walk ({name})" for name in expected for _ in range(2)]


def test_a_build_that_fails_is_told_and_the_others_are_walked(
    builds_of: Callable[[str, Callable[[steps.Builds], Any]], Any], said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NamedLaunch, "fails", EXCHANGE)
    ready, refused = builds_of("int8", lambda builds: builds.captured(GAMMA, False))
    assert refused == {EXCHANGE: "injected"}
    assert list(ready) == [name for name in (*steps.builds(False), steps.PLAIN) if name != EXCHANGE]
    assert f"{EXCHANGE!r} isn't timed: injected" in said


def test_a_build_has_the_steady_deadline_from_its_first_walk_on(
    builds_of: Callable[[str, Callable[[steps.Builds], Any]], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "DEADLINE", Deadline(20.0, 1.0))

    def deadlines(builds: steps.Builds) -> tuple[int, int]:
        executor = builds.runtime._executors["int8"]
        assert isinstance(executor, executors.KernelExecutor)
        return executor.params.startup_deadline_ns, executor.params.steady_deadline_ns

    assert builds_of("int8", deadlines) == (10**9, 10**9)


def test_nothing_is_walked_after_the_whole_build_fails(
    builds_of: Callable[[str, Callable[[steps.Builds], Any]], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NamedLaunch, "fails", steps.WHOLE)
    with pytest.raises(KernelError, match="injected"):
        builds_of("int8", lambda builds: builds.captured(GAMMA, False))
    assert NamedLaunch.launched == [f"the walk ({steps.WHOLE})"]
