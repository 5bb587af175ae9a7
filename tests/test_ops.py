"""torch.ops.tp_walk.walk: the walk as an operator."""

from __future__ import annotations

import pytest
import torch
from torch import library

import tp_walk
from tp_walk import MarkovHead, Noise, WalkRuntime

V = 96


@pytest.fixture
def runtime():
    generator = torch.Generator().manual_seed(0)
    w1, w2 = (torch.randn(V, 8, generator=generator).bfloat16() for _ in range(2))
    with WalkRuntime(MarkovHead(w1, w2), max_batch=4, max_gamma=4, device="cpu") as made:
        yield made


def arguments(runtime: WalkRuntime) -> tuple:
    base = torch.randn(2, 3, V, generator=torch.Generator().manual_seed(1)).bfloat16()
    anchors, temperatures = torch.tensor([3, 4]), torch.tensor([0.0, 50.0])
    return runtime.handle, base, anchors, temperatures, torch.tensor([7]), torch.tensor([11])


def test_the_operator_is_the_walk(runtime: WalkRuntime) -> None:
    handle, base, anchors, temperatures, key, offset = arguments(runtime)
    right = runtime.walk(base, anchors, temperatures, Noise(7, 11), logits="full", lse=True)
    tokens, logits, lse = torch.ops.tp_walk.walk(
        handle, base, anchors, temperatures, key, offset, logits="full", lse=True
    )
    assert torch.equal(tokens, right.tokens)
    assert torch.equal(logits, right.logits)
    assert torch.equal(lse, right.lse)
    assert offset.item() == 12


def test_what_was_not_asked_for_is_empty(runtime: WalkRuntime) -> None:
    handle, base, anchors, *_ = arguments(runtime)
    tokens, logits, lse = torch.ops.tp_walk.walk(handle, base, anchors)
    assert torch.equal(tokens, runtime.walk(base, anchors).tokens)
    assert logits.shape == lse.shape == (0,)


@pytest.mark.parametrize("logits", ["none", "local", "full"])
def test_schema_and_fake_agree_with_the_implementation(runtime: WalkRuntime, logits: str) -> None:
    options = {"logits": logits, "lse": logits == "local"}
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    library.opcheck(torch.ops.tp_walk.walk, arguments(runtime), options, test_utils=checks)


def test_it_compiles_into_one_graph(runtime: WalkRuntime) -> None:
    handle, base, anchors, temperatures, key, offset = arguments(runtime)

    def step(base: torch.Tensor, anchors: torch.Tensor, offset: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, *_ = torch.ops.tp_walk.walk(handle, base + 0, anchors, temperatures, key, offset)
        second, *_ = torch.ops.tp_walk.walk(handle, base, first[:, -1], temperatures, key, offset)
        return first + 0, second

    right = step(base, anchors, offset)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    counter = torch.tensor([11])
    for got, want in zip(compiled(base, anchors, counter), right, strict=True):
        assert torch.equal(got, want)
    assert counter.item() == offset.item() == 13


def test_a_handle_without_a_runtime(runtime: WalkRuntime) -> None:
    _, base, anchors, *_ = arguments(runtime)
    with pytest.raises(tp_walk.RuntimeClosedError, match="handle 0"):
        torch.ops.tp_walk.walk(0, base, anchors)
