"""A plan's walk compared with the oracle's, on any device and as part of any world."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from oracle import Problem, solve

import tp_walk


def head_of(problem: Problem) -> tp_walk.MarkovHead:
    d2t = None if problem.d2t is None else torch.tensor(problem.d2t)
    return tp_walk.MarkovHead(torch.tensor(problem.w1).bfloat16(), torch.tensor(problem.w2).bfloat16(), d2t)


def noise_of(problem: Problem, device: torch.device | str = "cpu") -> tp_walk.Noise:
    rows = None if problem.rows is None else torch.tensor(problem.rows, device=device)
    return tp_walk.Noise(torch.tensor(problem.keys, device=device), torch.tensor(problem.offsets, device=device), rows)


def check_problem(
    problem: Problem, plan: str, device: torch.device | str = "cpu", layout: str = "full", alone: bool = False
) -> None:
    """Walks the problem on this rank, as part of the world if there is one and it isn't to be `alone`; tokens, logits
    and offsets must be the oracle's to the bit, log-sum-exps as near as is promised. layout: "full", or "sharded" base
    logits with a padded tail.
    """
    right = solve(problem, int8="int8" in plan)
    world = dist.get_world_size() if dist.is_initialized() and not alone else 1
    batch, gamma, _ = problem.base.shape
    base = torch.tensor(problem.base, dtype=torch.float32 if problem.rounding == "none" else torch.bfloat16).to(device)
    anchors = torch.tensor(problem.anchors, device=device)
    sampled = problem.temperatures is not None
    temperatures = torch.tensor(problem.temperatures, device=device) if sampled else None
    with tp_walk.WalkRuntime(
        head_of(problem),
        max_batch=batch,
        max_gamma=gamma,
        rounding=problem.rounding,
        group=dist.group.WORLD if world > 1 else None,
        device=device,
        plans=[plan],
    ) as runtime:
        start, stop = runtime.shard.start, runtime.shard.stop
        if layout == "sharded":
            padded = base.new_full((batch, gamma, stop - start + 5), float("nan"))
            padded[..., : stop - start] = base[..., start:stop]
            base = padded
        noise = noise_of(problem, device)
        out = runtime.walk(base, anchors, temperatures, noise, plan, logits="full", lse=True)
        assert_same(out.tokens, right.tokens)
        assert_same(out.logits, right.logits)
        assert_log_sum_exp(out.lse, right.lse)
        assert isinstance(noise.offset, torch.Tensor)
        assert noise.offset.tolist() == [int(offset) + sampled for offset in problem.offsets]
        local = runtime.walk(base, anchors, temperatures, noise_of(problem, device), plan, logits="local")
        assert_same(local.logits, right.logits[..., start:stop])


def assert_log_sum_exp(got: torch.Tensor | None, right: np.ndarray) -> None:
    """As WalkOutput has it: within 1e-5 and a rounding to float32 of the exact value."""
    assert got is not None
    np.testing.assert_allclose(got.cpu().numpy(), right, rtol=2.0**-24, atol=1e-5)


def assert_same(got: torch.Tensor | None, right: np.ndarray) -> None:
    assert got is not None
    got = got.cpu()
    np.testing.assert_array_equal(got.float().numpy() if got.is_floating_point() else got.numpy(), right)
