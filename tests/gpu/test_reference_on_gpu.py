"""The reference plans on a GPU: the same answers, no look by the host, and graphs that can hold them."""

from __future__ import annotations

import pytest
import torch
from agreement import check_problem, head_of, noise_of
from oracle import make_problem

import tp_walk

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("plan", ["reference", "reference_int8"])
@pytest.mark.parametrize("rounding", ["engine", "once", "none"])
@pytest.mark.parametrize("seed", range(4))
def test_agrees_with_the_oracle(seed: int, rounding: str, plan: str) -> None:
    problem = make_problem(
        seed,
        vocab=90 + 7 * seed,
        rank=16,
        batch=4,
        gamma=3,
        rounding=rounding,
        draft=seed % 2 == 1,
        sampled=seed >= 1,
        specials=seed >= 2,
    )
    check_problem(problem, plan, "cuda")


def test_a_graph_replays_with_fresh_noise_and_new_arguments() -> None:
    problem = make_problem(3, vocab=200, rank=16, batch=4, gamma=3, sampled=True)
    base = torch.tensor(problem.base).bfloat16().cuda()
    anchors = torch.tensor(problem.anchors).cuda()
    temperatures = torch.tensor([0.0, 100.0, 100.0, 100.0]).cuda()
    valid = torch.tensor(4, dtype=torch.int32).cuda()
    with tp_walk.WalkRuntime(head_of(problem), device="cuda", plans=["reference"]) as runtime:
        noise = noise_of(problem, "cuda")

        def walk(noise: tp_walk.Noise) -> tp_walk.WalkOutput:
            return runtime.walk(
                base, anchors, temperatures, noise, "reference", logits="full", num_valid=valid, lse=True
            )

        walk(noise)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = walk(noise)
        for replay in range(3):
            if replay == 2:
                anchors.add_(1).remainder_(200)
                valid.fill_(3)
            at = noise.offset.clone()
            before = captured.tokens.clone()
            graph.replay()
            eager = walk(tp_walk.Noise(noise.key, at.clone(), noise.rows))  # which advances an offset of its own
            live = int(valid)
            assert torch.equal(captured.tokens[:live], eager.tokens[:live])
            assert torch.equal(captured.logits[:live], eager.logits[:live])
            assert torch.equal(captured.lse[:live], eager.lse[:live])
            assert torch.equal(captured.tokens[live:], before[live:])
            assert (noise.offset - at).tolist() == [1] * live + [0] * (4 - live)


def test_an_anchor_out_of_range_is_clamped() -> None:
    problem = make_problem(4, vocab=100, rank=8, batch=2, gamma=2)
    base = torch.tensor(problem.base).bfloat16().cuda()
    with tp_walk.WalkRuntime(head_of(problem), device="cuda", plans=["reference"]) as runtime:
        wild = runtime.walk(base, torch.tensor([-3, 10**9]).cuda(), plan="reference")
        clamped = runtime.walk(base, torch.tensor([0, 99]).cuda(), plan="reference")
        assert torch.equal(wild.tokens, clamped.tokens)
