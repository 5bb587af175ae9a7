"""How should full logits reach every rank: stored by all kernels while the walk goes on, or gathered afterwards?

    python experiments/full_logits.py

For each batch, on all GPUs of this machine: tp_bf16 greedy without logits; at T = 1 without logits, with local logits,
with log-sum-exps besides, and with full logits in both ways and into the caller's own memory. Both ways must give the
same bits. `peer_logits.FULL_LOGITS` keeps the faster one per batch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal
from unittest import mock

import click
import torch

from tp_walk import MarkovHead, Noise, WalkOutput, WalkRuntime, peer_logits
from tp_walk.bench import numbers
from tp_walk.config import LogitsMode
from tp_walk.errors import WalkError
from tp_walk.group import WalkGroup
from tp_walk.precompile import compile_together, current_gpu
from tp_walk.precompile import jobs as precompile_jobs
from tp_walk.ranks import run_ranks
from tp_walk.results import Column, ResultTable, environment
from tp_walk.timing import METHOD, BlockTimer, CapturedWork
from tp_walk.workload import Ranks

RESULT = Path(__file__).parent / "results" / "full_logits.json"
MARKOV_RANK = 256
WAYS: tuple[Literal["peers", "collective"], ...] = ("peers", "collective")

COLUMNS = (
    Column("batch", "batch"),
    Column("greedy_us", "greedy"),
    Column("none_us", "T = 1"),
    Column("local_us", "local logits"),
    Column("lse_us", "local logits, log-sum-exp"),
    Column("peers_us", "full, by all kernels"),
    Column("copied_us", "full, by all kernels, then copied"),
    Column("collective_us", "full, gathered afterwards"),
    Column("local_ratio", "local / greedy", 2),
    Column("full_ratio", "full / greedy", 2),
)


class Walks:
    """One batch's walks on this rank's GPU, each a graph."""

    def __init__(self, runtime: WalkRuntime, vocab_size: int, batch: int, gamma: int) -> None:
        device = runtime.device
        generator = torch.Generator(device).manual_seed(batch)
        base = torch.empty(batch, gamma, vocab_size, dtype=torch.bfloat16, device=device)
        base.normal_(0.0, 3.0, generator=generator)
        self._runtime = runtime
        self._base = base[..., runtime.shard.start : runtime.shard.stop].contiguous()
        self._anchors = torch.randint(vocab_size, (batch,), generator=generator, device=device)
        self._temperatures = torch.ones(batch, device=device)
        self._out: dict[str, WalkOutput] = {}
        own = torch.empty(batch, gamma, vocab_size, dtype=runtime.logits_dtype, device=device)
        self.ready = {
            "greedy": self._captured("greedy", "none", sampled=False),
            "none": self._captured("none", "none"),
            "local": self._captured("local", "local"),
            "lse": self._captured("lse", "local", lse=True),
            "copied": self._captured("copied", "full", own, how="peers"),
        }
        for how in WAYS:
            self.ready[how] = self._captured(how, "full", how=how)
        torch.cuda.synchronize()
        runtime.check()

    def check(self) -> None:
        """Raises WalkError if the ways differ, on any rank."""
        gathered = self._out["collective"]
        for name in ("peers", "copied"):
            out = self._out[name]
            assert out.logits is not None
            assert gathered.logits is not None
            if not torch.equal(out.tokens, gathered.tokens):
                raise WalkError(f"{name}: tokens differ from those of the gathered walk")
            wrong = int((out.logits.view(torch.int16) != gathered.logits.view(torch.int16)).sum())
            if wrong:
                raise WalkError(f"{name}: {wrong} of {out.logits.numel()} logits differ from the gathered ones")

    def _captured(
        self,
        name: str,
        logits: LogitsMode,
        memory: torch.Tensor | None = None,
        *,
        sampled: bool = True,
        lse: bool = False,
        how: Literal["peers", "collective"] = "peers",
    ) -> Callable[[], object]:
        # What a graph holds doesn't hold `self`, which has the graphs: they are freed with it, not by a later
        # collection. NCCL waits for the graphs that hold its collectives: a group that is destroyed before never ends.
        runtime, base, anchors, device = self._runtime, self._base, self._anchors, self._runtime.device
        batch, gamma = base.shape[:2]
        if logits != "none" and memory is None:
            memory = runtime.logits_buffer(batch, gamma, logits)
        tokens = torch.empty(batch, gamma, dtype=torch.int64, device=device)
        out = WalkOutput(tokens, memory, torch.empty(batch, gamma, device=device) if lse else None)
        temperatures = self._temperatures if sampled else None
        self._out[name] = out

        def walk() -> None:
            noise = Noise(5, 0) if sampled else None
            runtime.walk(base, anchors, temperatures, noise, "tp_bf16", logits, out=out, lse=lse)

        with mock.patch.object(peer_logits, "FULL_LOGITS", ((float("inf"), how),)):
            walk()
            return CapturedWork(walk)


def measure(vocab_size: int, batches: tuple[int, ...], gamma: int, iterations: int) -> ResultTable:
    """On this rank; a collective."""
    ranks = Ranks.of_this_run()
    group = WalkGroup(ranks.group, ranks.device)
    generator = torch.Generator(ranks.device).manual_seed(1)
    w1, w2 = (
        torch.randn(vocab_size, MARKOV_RANK, device=ranks.device, generator=generator).mul_(0.06).bfloat16()
        for _ in range(2)
    )
    rows = []
    with (
        WalkRuntime(
            MarkovHead(w1, w2), max(batches), gamma, group=ranks.fast_group, device=ranks.device, plans=["tp_bf16"]
        ) as runtime,
        BlockTimer(group, ranks.device) as timer,
    ):
        for batch in batches:
            walks = Walks(runtime, vocab_size, batch, gamma)
            group.stage(f"comparison at batch {batch}", walks.check)
            timings = timer.measure(walks.ready, iterations)
            runtime.check()
            row: dict[str, object] = {
                "batch": batch,
                "vocab_size": vocab_size,
                "gamma": gamma,
                "iterations": iterations,
            }
            for name, timing in timings.items():
                row |= {f"{name}_us": timing.median_us, f"{name}_p99_us": timing.p99_us}
            greedy = timings["greedy"].median_us
            row["local_ratio"] = timings["local"].median_us / greedy
            row["full_ratio"] = min(timings[how].median_us for how in WAYS) / greedy
            rows.append(row)
            if group.rank == 0:
                click.echo(", ".join(f"{name} {timing.median_us:.1f}" for name, timing in timings.items()))
    return ResultTable(
        f"Full logits on {group.world_size} GPUs: time of a block, µs (V = {vocab_size:,}, γ = {gamma}, T = 1)",
        METHOD,
        environment(),
        COLUMNS,
        rows,
    )


@click.command(help=str(__doc__).partition("\n")[0])
@click.option("--vocab", "vocab_size", type=int, default=151_936, show_default=True)
@click.option("--batches", callback=numbers, default="1,8,64", show_default=True)
@click.option("--gamma", type=int, default=7, show_default=True)
@click.option("--iterations", type=int, default=200, show_default=True)
@click.option("--out", default=RESULT, type=click.Path(dir_okay=False, path_type=Path), help="File to write.")
def main(vocab_size: int, batches: tuple[int, ...], gamma: int, iterations: int, out: Path) -> None:
    if torch.cuda.device_count() < 2:
        raise click.ClickException("this compares ways between GPUs, and needs two of them at least")
    world_size = min(8, 1 << (torch.cuda.device_count().bit_length() - 1))
    target = current_gpu()
    wanted = precompile_jobs(vocab_size, MARKOV_RANK, [world_size], max(batches), ["engine"], target)
    compile_together([job for job in wanted if job.purpose.startswith(("tp_bf16 ", "self-test "))], target.arch)
    table = run_ranks(world_size, measure, vocab_size, batches, gamma, iterations)[0]
    table.write(out)
    click.echo(table.to_markdown())


if __name__ == "__main__":
    main()
