"""Walks in CUDA graphs: their kernels and nothing else, fresh noise, any mix of graphs and eager calls, any stream."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_pool import RankPool, outcome
from walk_lab import MAX_BATCH, QWEN3, SMALL, WORLDS, Lab, assert_same, definition, here, lab, plans_of

from tp_walk import Noise, WalkOutput
from tp_walk.errors import WalkOverlap
from tp_walk.peer_memory import cuda_call

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def captured(walk: Callable[[], Any], keep_graph: bool = False) -> torch.cuda.CUDAGraph:
    """A graph of what `walk` enqueues. A kernel that is captured has run before."""
    walk()
    graph = torch.cuda.CUDAGraph(keep_graph=keep_graph)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        walk()
    return graph


def node_types(graph: torch.cuda.CUDAGraph) -> Counter[str]:
    from cuda.bindings import runtime

    handle = runtime.cudaGraph_t(graph.raw_cuda_graph())
    status, _, count = runtime.cudaGraphGetNodes(handle)
    assert status == runtime.cudaError_t.cudaSuccess
    _, nodes, _ = runtime.cudaGraphGetNodes(handle, count)
    return Counter(cuda_call("cudaGraphNodeGetType", node).name.removeprefix("cudaGraphNodeType") for node in nodes)


# ---- what a graph holds ----------------------------------------------------------------------------------------------


def _nodes(world: int) -> None:
    """Whole rows for those who walk them alone are brought by a kernel of its own; int8_split always has one before."""
    here_is = lab("exact", SMALL, world)
    for plan, layout, batch, sampled, logits in itertools.product(
        plans_of(world), ("full", "sharded"), (1, 8, 64), (False, True), ("none", "local", "full")
    ):
        if plan == "int8_split" and logits != "none":
            continue  # rows of logits are collected afterwards
        if plan == "int8" and logits == "local" and world > 1:
            continue  # a GPU that walks all of W2 copies its columns afterwards
        graph = _graph_with_everything(here_is, plan, layout, batch, sampled, logits)
        count = 2 if plan == "int8_split" or (plan == "int8" and layout == "sharded" and world > 1) else 1
        assert node_types(graph) == {"Kernel": count}, (plan, layout, batch, sampled, logits)
    here_is.runtime.check()


def _graph_with_everything(
    here_is: Lab, plan: str, layout: str, batch: int, sampled: bool, logits: Any
) -> torch.cuda.CUDAGraph:
    """A walk into the caller's buffers, with all that the device reads: num_valid, temperatures, a noise offset."""
    given, runtime, device = here_is.inputs, here_is.runtime, here_is.device
    offset, valid = torch.zeros(1, dtype=torch.int64, device=device), torch.ones((), dtype=torch.int32, device=device)
    tokens = torch.zeros(batch, 7, dtype=torch.int64, device=device)
    out = WalkOutput(tokens, None if logits == "none" else runtime.logits_buffer(batch, 7, logits))
    arguments = (
        here_is.laid_out(given.base[:batch, :7], layout),
        given.anchors[:batch],
        given.temperatures[:batch] if sampled else None,
        Noise(5, offset) if sampled else None,
    )
    return captured(lambda: runtime.walk(*arguments, plan, logits, num_valid=valid, out=out), keep_graph=True)


@pytest.mark.parametrize("world", WORLDS)
def test_a_captured_walk_is_its_kernels(ranks: RankPool, world: int) -> None:
    ranks(_nodes, world)


def test_the_count_of_nodes_sees_other_nodes(ranks: RankPool) -> None:
    assert ranks(_other_nodes) == [{"Memset": 1, "Kernel": 1}] * len(ranks.processes)


def _other_nodes() -> Counter[str]:
    _, _, device = here()
    values = torch.ones(1 << 20, device=device)

    def work() -> None:
        cuda_call("cudaMemsetAsync", values.data_ptr(), 0, values.nbytes, torch.cuda.current_stream().cuda_stream)
        values.add_(1.0)

    return node_types(captured(work, keep_graph=True))


# ---- replays ---------------------------------------------------------------------------------------------------------


class Captured:
    """A walk in a graph, with buffers of its own; sampled rows draw with a device-side offset."""

    def __init__(self, here_is: Lab, batch: int, gamma: int, plan: str, sampled: bool, layout: str = "full") -> None:
        self.base = here_is.laid_out(here_is.inputs.base[:batch, :gamma], layout)
        self.lab, self.batch, self.gamma, self.plan, self.sampled = here_is, batch, gamma, plan, sampled
        given, device = here_is.inputs, here_is.device
        self.anchors = given.anchors[:batch].clone()
        self.temperatures = given.temperatures[:batch].clone() if sampled else None
        self.offset = torch.zeros(1, dtype=torch.int64, device=device)
        self.tokens = torch.empty(batch, gamma, dtype=torch.int64, device=device)
        self._graph = captured(self._walk)

    def _walk(self) -> None:
        noise = Noise(5, self.offset) if self.sampled else None
        out = WalkOutput(self.tokens)
        self.lab.runtime.walk(self.base, self.anchors, self.temperatures, noise, self.plan, out=out)

    def replay(self, anchors: torch.Tensor, offset: int) -> None:
        """From other anchors; checked by `right`."""
        self.anchors.copy_(anchors[: self.batch])
        self.offset.fill_(offset)
        self._graph.replay()

    def right(self, anchors: torch.Tensor, offset: int) -> torch.Tensor:
        noise = Noise(5, offset) if self.sampled else None
        base = self.lab.inputs.base[: self.batch, : self.gamma]
        alone, plan = self.lab.alone.runtime, definition(self.plan)
        return alone.walk(base, anchors[: self.batch], self.temperatures, noise, plan).tokens


def _mixes(vocab_size: int, world: int, walks: int) -> None:
    """Graphs of several sizes, odd gammas among them, and eager walks, in the same random order on every rank."""
    here_is = lab("exact", vocab_size, world)
    sizes = [(1, 7), (5, 16), (8, 1), (33, 3), (64, 7)]
    graphs = [
        Captured(here_is, batch, gamma, plan, sampled, layout)
        for plan in plans_of(world)
        for layout in ("full", "sharded")
        for number, (batch, gamma) in enumerate(sizes)
        for sampled in [number % 2 == 0]
    ]
    rng = random.Random(vocab_size)
    for walk in range(walks):
        graph, offset = rng.choice(graphs), rng.randrange(1 << 34)
        anchors = torch.tensor([rng.randrange(vocab_size) for _ in range(MAX_BATCH)], device=here_is.device)
        if rng.random() < 0.7:
            graph.replay(anchors, offset)
            tokens = graph.tokens
        else:
            noise = Noise(5, offset) if graph.sampled else None
            arguments = graph.base, anchors[: graph.batch], graph.temperatures, noise, graph.plan
            tokens = here_is.runtime.walk(*arguments).tokens
        assert_same(tokens, graph.right(anchors, offset), (walk, graph.plan, graph.batch, graph.gamma))
        here_is.runtime.check()


@pytest.mark.parametrize(("vocab_size", "walks"), [(SMALL, 150), (QWEN3, 40)])
@pytest.mark.parametrize("world", WORLDS)
def test_graphs_and_eager_walks_in_any_order(ranks: RankPool, world: int, vocab_size: int, walks: int) -> None:
    ranks(_mixes, vocab_size, world, walks)


def _draws_afresh(world: int) -> None:
    graph = Captured(lab("exact", SMALL, world), 64, 7, "tp_bf16", True)
    anchors = graph.lab.inputs.anchors
    graph.replay(anchors, 40)
    drawn = [graph.tokens.clone()]
    for _ in range(4):
        graph._graph.replay()
        drawn.append(graph.tokens.clone())
    assert int(graph.offset) == 45
    for offset, tokens in enumerate(drawn, start=40):
        assert_same(tokens, graph.right(anchors, offset), offset)
    greedy = ~(graph.temperatures > 0)
    assert all(torch.equal(tokens[greedy], drawn[0][greedy]) for tokens in drawn)
    assert all(not torch.equal(tokens, drawn[0]) for tokens in drawn[1:])


@pytest.mark.parametrize("world", WORLDS)
def test_replays_draw_fresh_noise(ranks: RankPool, world: int) -> None:
    ranks(_draws_afresh, world)


def _reloads(world: int) -> None:
    here_is = lab("exact", SMALL, world)
    other = lab("gauss", SMALL, world)
    graph = Captured(here_is, 5, 7, "tp_bf16", False)
    weights = here_is.head.w1.clone()
    try:
        here_is.runtime.reload(other.head)
        graph.replay(here_is.inputs.anchors, 0)
        assert_same(graph.tokens, other.walk(5, 7, "tp_bf16").tokens, "after the reload")
    finally:
        here_is.runtime.reload(here_is.head)
    assert torch.equal(here_is.head.w1, weights), "the caller's head is the caller's"
    graph.replay(here_is.inputs.anchors, 0)
    assert_same(graph.tokens, here_is.right("tp_bf16", False)[:5, :7], "and back")


@pytest.mark.parametrize("world", WORLDS)
def test_reloaded_weights_reach_captured_graphs(ranks: RankPool, world: int) -> None:
    ranks(_reloads, world)


# ---- padded batches, wild anchors ------------------------------------------------------------------------------------


def _leaves_inert_rows(world: int) -> None:
    here_is = lab("exact", SMALL, world)
    given, device, batch, gamma = here_is.inputs, here_is.device, 9, 5
    valid = torch.zeros((), dtype=torch.int32, device=device)
    flagged = here_is.runtime.stats()["clamped_anchors"]
    for plan in plans_of(world):
        for logits, layout in itertools.product(("local", "full"), ("full", "sharded")):
            whole = here_is.walk(batch, gamma, plan, sampled=True, logits=logits)
            base = here_is.laid_out(given.base[:batch, :gamma], layout)
            assert whole.logits is not None
            for count in (0, 1, 4, 8, 9, 10, -3):
                live = min(max(count, 0), batch)
                anchors = given.anchors[:batch].clone()
                anchors[live:] = 1 << 40  # may be anything
                offsets = torch.zeros(batch, dtype=torch.int64, device=device)
                out = WalkOutput(torch.full_like(whole.tokens, -7), torch.full_like(whole.logits, 5.0))
                here_is.runtime.walk(
                    base,
                    anchors,
                    given.temperatures[:batch],
                    Noise(5, offsets),
                    plan,
                    logits,
                    num_valid=valid.fill_(count),
                    out=out,
                )
                assert out.logits is not None
                for got, right, untouched in ((out.tokens, whole.tokens, -7), (out.logits, whole.logits, 5.0)):
                    assert_same(got[:live], right[:live], (plan, logits, count))
                    assert (got[live:] == untouched).all(), (plan, logits, count)
                assert offsets.tolist() == [1] * live + [0] * (batch - live), (plan, logits, count)
    assert here_is.runtime.stats()["clamped_anchors"] == flagged
    here_is.runtime.check()


@pytest.mark.parametrize("world", WORLDS)
def test_rows_from_num_valid_on_are_inert(ranks: RankPool, world: int) -> None:
    ranks(_leaves_inert_rows, world)


def _clamps(world: int) -> dict[str, tuple[int, int]]:
    _, _, device = here()
    here_is = lab("exact", SMALL, world)
    flagged = {}
    for plan in plans_of(world):
        graph = Captured(here_is, 5, 3, plan, False)
        wild = torch.tensor([7, -3, SMALL - 1, 1 << 40, 9], device=device)
        tame = torch.tensor([7, 0, SMALL - 1, SMALL - 1, 9], device=device)
        graph.replay(wild, 0)
        assert_same(graph.tokens, graph.right(tame, 0), plan)
        torch.cuda.synchronize()
        flagged[plan] = here_is.runtime.stats()["clamped_anchors"][plan]
        graph.replay(tame, 0)
        torch.cuda.synchronize()
        assert here_is.runtime.stats()["clamped_anchors"][plan] == flagged[plan], "a good block flags nothing"
        here_is.runtime.check()
    return flagged


@pytest.mark.parametrize("world", WORLDS)
def test_anchors_out_of_range_are_clamped_and_flagged(ranks: RankPool, world: int) -> None:
    for flagged in ranks(_clamps, world):
        assert flagged.keys() == set(plans_of(world))
        for block, row in flagged.values():
            assert block > 0
            assert row in (1, 3)


# ---- streams ---------------------------------------------------------------------------------------------------------


def _walks_on_many_streams(world: int) -> None:
    """Small grids could run side by side, and would mix up their words."""
    here_is = lab("exact", SMALL, world)
    streams = [torch.cuda.Stream() for _ in range(4)]
    right = here_is.right("tp_bf16", False)
    walked = []
    for walk in range(100):
        stream = streams[walk % len(streams)]
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            walked.append(here_is.walk(5 + walk % 3, 7, "tp_bf16").tokens)
    torch.cuda.synchronize()
    here_is.runtime.check()
    for tokens in walked:
        assert_same(tokens, right[: len(tokens), :7], len(tokens))


@pytest.mark.parametrize("world", WORLDS)
def test_walks_on_several_streams_wait_for_each_other(ranks: RankPool, world: int) -> None:
    ranks(_walks_on_many_streams, world)


def _two_graphs_at_once() -> None:
    """So few CTAs that both graphs' kernels find room at once. Nothing orders graphs on two streams, so one is refused;
    either's tokens are right or its anchors.
    """
    here_is = lab("exact", 500, 1)
    anchors = here_is.inputs.anchors
    graphs = [Captured(here_is, 64, 16, "tp_bf16", False) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in graphs]
    error = None
    for _ in range(100):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay(anchors, 0)
        torch.cuda.synchronize()
        if error := outcome(here_is.runtime.check):
            break
    assert isinstance(error, WalkOverlap), f"100 pairs of replays at once, and no overlap: {error!r}"
    right, anchored = graphs[0].right(anchors, 0), anchors[:, None].expand(-1, 16)
    for graph in graphs:
        assert torch.equal(graph.tokens, right) or torch.equal(graph.tokens, anchored)
    here_is.runtime.reset()
    for graph in graphs:
        graph.replay(anchors, 0)
        assert_same(graph.tokens, right, "one after another, after the reset")
    here_is.runtime.check()


def test_two_graphs_at_once_are_an_overlap(ranks: RankPool) -> None:
    ranks(_two_graphs_at_once)
