"""Faults that only GPUs have: walks held in a step, words forged in a mailbox, graphs, NCCL, block numbers that wrap.

What a host can't do to a kernel that runs is done by a build of it: the victim's walks can be held in any step
(kernel_variants, "stalled"). The other ranks run the production build.
"""

from __future__ import annotations

import ctypes
import queue
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import fault_cases as cases
import kernel_variants
import torch
import torch.distributed as dist
from fault_cases import Case, Expected
from fault_scene import BATCH, FIRST_ANCHOR, GAMMA, VICTIM, GivenWalk, Note, Scene, Setting, alone_of, head_of

from tp_walk import Deadline, WalkRuntime
from tp_walk.mailbox import POST_COPIES, POST_WORLD_SIZE, WORD_BYTES, MailboxLayout, header_tag, make_key, step_tag
from tp_walk.peer_memory import cuda_call, cuda_runtime
from tp_walk.peers import FIRST_BLOCK, PeerMailboxes
from tp_walk.precompile import compile_together, current_gpu

SETTING = Setting("cuda", "tp_bf16", 4096, 256, Deadline(startup_s=2.5, steady_s=1.0), max_batch=64, standby="int8")
# Fills every SM, so that a kernel of NCCL finds no room beside it.
FULL_GRID = replace(SETTING, vocab_size=151_936, max_batch=8)
# Leaves room for another walk beside it. (Compiled like SETTING's.)
SMALL_GRID = replace(SETTING, vocab_size=512)

SECOND_BLOCK = FIRST_BLOCK + 1
# A single request, which two ranks agree on by posts; a batch that one pass multiplies in narrow columns, one in whole
# ones, and one that takes four passes a step.
BATCHES = (1, BATCH, 6, 64)
MANY = BATCHES[-1]
WITHHELD_ROW = 21  # of MANY: in the second of a step's passes, so that others are in flight on both sides
_FORGED = make_key(1e30, 7)
_GAMMA_BIT = 1 << 32  # of a header's first word


def compile_ahead(world: int) -> None:
    """Fills the kernel cache, on all cores."""
    target = current_gpu()
    wanted = [
        *kernel_variants.jobs(["production", "stalled"], SETTING.vocab_size, world, ["tp_bf16", "int8"], target),
        *kernel_variants.jobs(["production"], FULL_GRID.vocab_size, world, ["tp_bf16"], target),
        *kernel_variants.jobs(["production"], SETTING.vocab_size, 1, ["int8"], target),  # for `prepare`
    ]
    compile_together(wanted, target.arch)


def prepare(rank: int) -> None:
    """What a rank does before it is needed: a CUDA context, weights, and a first runtime, which imports and loads."""
    device = SETTING.device_of(rank)
    torch.cuda.set_device(device)
    runtime = WalkRuntime(head_of(SETTING, device), device=device, plans=["int8"])
    alone_of(SETTING, device)
    runtime.close()


# ---- below the surface -----------------------------------------------------------------------------------------------


class Mailbox:
    """This rank's mailbox, read and written by its host while a walk runs."""

    def __init__(self, runtime: WalkRuntime) -> None:
        executor: Any = runtime._executors["tp_bf16"]
        self.peers: PeerMailboxes = executor._mailboxes
        self.layout: MailboxLayout = executor._layout
        self._own = self.peers.addresses[runtime.rank]
        self._stream = _stream()  # a copy on the default one would wait for the walk

    def write(self, offset: int, data: bytes) -> None:
        buffer = ctypes.create_string_buffer(data, len(data))
        self._copy(self._own + offset, ctypes.addressof(buffer), len(data))

    def read(self, offset: int, size: int) -> bytes:
        buffer = ctypes.create_string_buffer(size)
        self._copy(ctypes.addressof(buffer), self._own + offset, size)
        return buffer.raw

    def store_word(self, offset: int, key: int, tag: int) -> None:
        self.write(offset, struct.pack("<QQ", key, tag))

    def hold(self, step: int, until_s: float, row: int | None = None) -> None:
        """The next walks stand still in `step` until so many seconds after their own deadline; or, of a row alone, the
        result is withheld so long.
        """
        words = struct.pack("<QqQ", step + 1, int(until_s * 1e9), 0 if row is None else row + 1)
        self.write(kernel_variants.STALL_STEP_OFFSET, words)

    def let_go(self) -> None:
        self.write(kernel_variants.STALL_STEP_OFFSET, bytes(24))

    def _copy(self, destination: int, source: int, size: int) -> None:
        kind = cuda_runtime().cudaMemcpyKind.cudaMemcpyDefault
        cuda_call("cudaMemcpyAsync", destination, source, size, kind, self._stream.cuda_stream)
        self._stream.synchronize()


def _stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def _open_with_stalls(scene: Scene) -> None:
    kernel_variants.use("stalled" if scene.is_victim else "production")
    try:
        scene.open_with_standby()
    finally:
        kernel_variants.use("production")


def _captured(scene: Scene, walk: GivenWalk, raises: bool = False) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        walk.run(scene.open_runtime)
        if raises:
            raise RuntimeError("injected")
    return graph


# ---- scenarios -------------------------------------------------------------------------------------------------------


def held_in_a_step(scene: Scene, arguments: dict[str, Any]) -> None:
    """step, action: the victim's kernel stands still there past everybody's deadline, and its host does what, if
    anything. block: arguments of that block. row: whose result alone is withheld, if not all stands still.
    """
    _open_with_stalls(scene)
    scene.block()
    if scene.runtime is not None and scene.is_victim:
        mailbox = Mailbox(scene.runtime)
        mailbox.hold(arguments["step"], 1.0, arguments.get("row"))

        def act() -> None:
            time.sleep(0.2)
            scene.act(arguments["action"])

        scene.block(act, **arguments["block"])
        mailbox.let_go()
    else:
        scene.block(**arguments["block"])
    scene.block()
    scene.recover(arguments["action"])
    scene.close()


def late_once(scene: Scene, arguments: dict[str, Any]) -> None:
    """late_s: by so much the victim misses the second block. After a reset all is well."""
    scene.open()
    scene.block()
    if scene.is_victim:
        time.sleep(arguments["late_s"])
    scene.block()
    scene.block()
    scene.reset()
    scene.block()
    scene.close()


def forged(scene: Scene, arguments: dict[str, Any]) -> None:
    """forge: what every rank but the victim does to its own mailbox, while the victim is held in `step` for 0.7 s of a
    block of `batch` requests.
    """
    _open_with_stalls(scene)
    scene.block()
    if scene.runtime is None:
        return
    mailbox = Mailbox(scene.runtime)
    batch = arguments["batch"]
    walk = scene.given(batch=batch, offset=scene.blocks + 1)  # as the block will be
    right = scene.alone.walk(walk.base, walk.anchors, walk.temperatures, walk.noise, "reference").tokens.tolist()
    if scene.is_victim:
        mailbox.hold(arguments["step"], 0.7 - scene.setting.deadline.steady_s)
        scene.block(batch=batch)
        mailbox.let_go()
    else:
        forge: Callable[[Mailbox, int, list[list[int]]], None] = arguments["forge"]
        previous = [[FIRST_ANCHOR + row, *tokens] for row, tokens in enumerate(right)]

        def act() -> None:
            time.sleep(0.3)
            forge(mailbox, arguments["step"], previous)

        scene.block(act, batch=batch)
    scene.block()
    scene.reset()
    scene.block()
    scene.close()


def forged_header(scene: Scene, arguments: dict[str, Any]) -> None:
    """The victim comes 0.6 s late to the second block, and the others forge its header meanwhile: another gamma."""
    scene.open()
    scene.block()
    if scene.runtime is None:
        return
    mailbox = Mailbox(scene.runtime)

    def forge() -> None:
        time.sleep(0.2)
        own = mailbox.read(mailbox.layout.header_word(SECOND_BLOCK, scene.rank, 0), WORD_BYTES)
        key, tag = struct.unpack("<QQ", own)
        assert tag == header_tag(SECOND_BLOCK)
        mailbox.store_word(mailbox.layout.header_word(SECOND_BLOCK, VICTIM, 0), key ^ _GAMMA_BIT, tag)

    if scene.is_victim:
        time.sleep(0.6)
        scene.block()
    else:
        scene.block(forge)
    scene.block()
    scene.reset()
    scene.block()
    scene.close()


# What follows is given each row's tokens from its anchor on: nothing may ask the GPU while it walks. It forges every
# row's word, since a warp takes those of its rows together: of one row alone the true word would come in time.


def forge_results(mailbox: Mailbox, step: int, previous: list[list[int]]) -> None:
    """The victim's results, ahead of the true ones: another token, the right tag."""
    for row, tokens in enumerate(previous):
        place = mailbox.layout.result_word(SECOND_BLOCK, step, row, VICTIM)
        mailbox.store_word(place, _FORGED, step_tag(SECOND_BLOCK, step, tokens[step]))


def forge_posts(mailbox: Mailbox, step: int, previous: list[list[int]]) -> None:
    """The result of a single request: on two ranks all posts of the victim, else as it is of several."""
    layout = mailbox.layout
    if layout.world_size > POST_WORLD_SIZE:
        forge_results(mailbox, step, previous)
        return
    word = struct.pack("<QQ", _FORGED, step_tag(SECOND_BLOCK, step, previous[0][step]))
    for copy in range(POST_COPIES):
        mailbox.write(layout.post_word(SECOND_BLOCK, step, copy, VICTIM, 0), word * layout.num_ctas)


def forge_garbage(mailbox: Mailbox, step: int, previous: list[list[int]]) -> None:
    """The victim's results, ahead of the true ones: garbage."""
    for row in range(len(previous)):
        mailbox.store_word(mailbox.layout.result_word(SECOND_BLOCK, step, row, VICTIM), 0xDEAD, 0xBEEF00)


def forge_poison(mailbox: Mailbox, step: int, previous: list[list[int]]) -> None:
    """A poison word that no kernel writes."""
    mailbox.store_word(mailbox.layout.poison_word(VICTIM), 0xDEADBEEF, 0xBEEF00)


def capture_fails(scene: Scene, arguments: dict[str, Any]) -> None:
    scene.open()
    scene.block()
    try:
        _captured(scene, scene.given(), raises=scene.is_victim)
    except RuntimeError as error:
        if str(error) != "injected":
            raise
    scene.block()
    scene.block()
    scene.close()


def replayed_alone(scene: Scene, arguments: dict[str, Any]) -> None:
    """The victim leaves out a replay. No Python runs on the others: on_poison must tell, and the next replay return."""
    told: queue.Queue[Exception] = queue.Queue()
    scene.open(on_poison=told.put)
    scene.block()
    walk = scene.given()
    graph = _captured(scene, walk)

    def replay() -> None:
        graph.replay()
        scene.wait()

    if scene.is_victim:
        time.sleep(arguments["late_s"])
    else:
        began = time.monotonic()
        graph.replay()
        try:
            error = told.get(timeout=20.0)
            scene.notes.append(Note("on_poison", type(error).__name__, str(error), began, time.monotonic()))
        except queue.Empty:
            pass  # noted as silence
        for part in ("the replay", "the next replay"):
            scene.watch(part, walk, replay)
    scene.block()
    scene.reset()
    scene.block()
    walk.tokens.fill_(-1)
    scene.watch("a replay after the reset", walk, replay)
    scene.close()


def near_wrap_around(scene: Scene, arguments: dict[str, Any]) -> None:
    """block: the number that all ranks go on with."""
    scene.open()
    if scene.runtime is not None:
        Mailbox(scene.runtime).peers.restart(arguments["block"])
    for batch, gamma in ((BATCH, 7), (MANY, 3), (1, 1), (MANY, 16), (BATCH, 7)):
        scene.block(batch=batch, gamma=gamma)
    scene.close()


def nccl_in_opposite_order(scene: Scene, arguments: dict[str, Any]) -> None:
    """A collective of NCCL on another stream, on the victim before the walk, on the others after it."""
    nccl = dist.new_group(backend="nccl")
    values, side = torch.ones(1 << 20, device=scene.device), _stream()
    dist.all_reduce(values, group=nccl)  # its set-up isn't what is tested
    scene.wait()
    scene.open()
    scene.block()

    def reduce() -> None:
        time.sleep(0.1)
        with torch.cuda.stream(side):
            dist.all_reduce(values, group=nccl)

    if scene.is_victim:
        reduce()
        scene.block()
    else:
        scene.block(reduce)
    scene.reset()
    scene.block()
    scene.close()
    dist.destroy_process_group(nccl)


def two_graphs_at_once(scene: Scene, arguments: dict[str, Any]) -> None:
    """Every rank replays two graphs on two streams, again and again, which no stream keeps apart."""
    scene.open()
    scene.block()
    walks = [scene.given(gamma=16), scene.given(gamma=16, anchor=9)]
    graphs = [_captured(scene, walk) for walk in walks]
    streams = [_stream(), _stream()]

    def replay() -> None:
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        scene.wait()

    for turn in range(20):
        scene.watch(f"turn {turn}", walks[turn % 2], replay)
        # Which of the two has failed isn't told; the other may have come through.
        scene.notes[-1] = replace(scene.notes[-1], anchored=True)
    scene.reset()
    scene.block()
    scene.close()


# ---- the cases -------------------------------------------------------------------------------------------------------


def gpu_cases() -> Iterator[Case]:
    """What the matrix has for GPUs beyond what any plan is asked."""
    steady_s = SETTING.deadline.steady_s
    lost = Expected(("WalkTimeout",), "rank 1", steady_s)
    for step in (0, GAMMA // 2, GAMMA - 1):
        told = replace(lost, says=rf"rank 1.* step {step}\b")
        # Where a step takes many passes, results follow a pass behind: the last rows' are of the step before.
        told_late = replace(lost, says=rf"rank 1.* step {max(step - 1, 0)}\b")
        for action in ("killed", "stopped"):
            for batch in BATCHES:
                arguments = {"step": step, "action": action, "block": {"batch": batch}}
                phase = f"step {step} of {GAMMA}, {batch} requests"
                yield Case(action, phase, SETTING, held_in_a_step, told_late if batch == MANY else told, arguments)
        for mode in ("sampled", "greedy"):
            block: dict[str, Any] = {"batch": MANY} | ({"temperatures": None} if mode == "greedy" else {})
            withheld = {"step": step, "action": None, "row": WITHHELD_ROW, "block": block}
            phase = f"step {step} of {GAMMA}, row {WITHHELD_ROW} of {MANY}, {mode}"
            yield Case("withholds a result", phase, SETTING, held_in_a_step, told, withheld)
    other_anchors = replace(lost, kinds=("WalkMismatch",), says="different anchors", victims_too=True)
    different = {"different": {"batch": MANY, "anchor": 4}, "alike": {"batch": MANY}}
    yield Case("other anchors", f"walk, {MANY} requests", SETTING, cases.given_something_else, other_anchors, different)
    torn_down = replace(lost, deadline_s=SETTING.deadline.startup_s)
    for action in ("killed", "stopped"):
        yield Case(action, "teardown", SETTING, cases.lost_at_the_end, torn_down, {"action": action})
    yield Case("late, then a reset", "walk", SETTING, late_once, lost, {"late_s": steady_s + 0.5})
    yield Case("an exception", "graph capture", SETTING, capture_fails, Expected())
    yield Case("leaves out a replay", "graph replay", SETTING, replayed_alone, lost, {"late_s": steady_s + 1.0})
    yield from forged_cases()
    for number in ((1 << 40) - 2, (1 << 64) - 2):
        wraps = {"block": number}
        yield Case("block number wraps", f"block {number:#x}", SETTING, near_wrap_around, Expected(), wraps)
    either = replace(lost, says="rank", may_pass=True, victims_too=True)
    yield Case("NCCL before the walk, not after", "walk", FULL_GRID, nccl_in_opposite_order, either)
    overlap = Expected(("WalkOverlap", "WalkMismatch", "WalkTimeout"), "rank", steady_s, True, True)
    yield Case("two graphs at once", "graph replay", SMALL_GRID, two_graphs_at_once, overlap)


def forged_cases() -> Iterator[Case]:
    """Words that were corrupted on their way, while rank 1 is held in a step."""
    steady_s, middle, last = SETTING.deadline.steady_s, GAMMA // 2, GAMMA - 1
    mismatch = Expected(("WalkMismatch",), "", steady_s, victims_too=True)
    header = replace(mismatch, says="different gamma")
    yield Case("corrupted header", "walk", SETTING, forged_header, header)
    tokens = replace(mismatch, says="different tokens before that step")
    last_tokens = replace(mismatch, says="different last_tokens", next_block=True)
    # The others drain without a word to rank 1, which then waits for them.
    corrupt = Expected(("WalkMismatch",), "poison word is corrupt", steady_s)
    one, _, few, many = BATCHES
    for fault, step, batch, forge, expected in (
        ("corrupted results", middle, one, forge_posts, tokens),
        ("corrupted results", middle, few, forge_results, tokens),
        ("corrupted results", middle, many, forge_results, tokens),
        ("corrupted results", last, one, forge_posts, last_tokens),
        ("corrupted results", last, few, forge_results, last_tokens),
        ("corrupted results", last, many, forge_results, last_tokens),
        ("garbage for a result, then the result", middle, few, forge_garbage, Expected()),
        ("garbage for a result, then the result", middle, many, forge_garbage, Expected()),
        ("corrupted poison word", middle, many, forge_poison, corrupt),
    ):
        arguments = {"step": step, "batch": batch, "forge": forge}
        yield Case(fault, f"step {step} of {GAMMA}, {batch} requests", SETTING, forged, expected, arguments)
