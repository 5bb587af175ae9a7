"""Does compute-sanitizer find anything in the walk kernels?

    python experiments/sanitize.py [--tool racecheck ...] [--limit-seconds 150]

Each tool runs small walks of a world of one in a process of its own, beside the others, which also compares their
tokens with the definition's. racecheck gets a build in which every lane arrives at an mbarrier for itself: in
production a warp's lanes meet (`__syncwarp()`) and the first one arrives for all, which the PTX memory model knows to
order what the others did, and the tool doesn't. The exit status is 1 if a tool finds something or doesn't end in time,
2 where there is no compute-sanitizer (it comes with the CUDA toolkit).
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import click
import kernel_variants
import torch
from kernel_variants import EACH_LANE_ARRIVES

from tp_walk import Deadline, MarkovHead, Noise, WalkOutput, WalkRuntime, precompile
from tp_walk.config import LogitsMode
from tp_walk.results import Column, ResultTable, environment

RESULT = Path(__file__).parent / "results" / "sanitize.json"
# Tool → the build that it is given.
TOOLS = {"memcheck": "production", "racecheck": EACH_LANE_ARRIVES, "synccheck": "production", "initcheck": "production"}
# Plan → its definition.
PLANS = {"tp_bf16": "reference", "int8": "reference_int8", "certified": "reference"}
# Rows of a multiple of 16 bytes: the copy engine moves whole 16-byte pieces, and memcheck takes the end of an
# allocation for the end of what was asked for, not of what CUDA hands out.
VOCAB_SIZE, GAMMA = 2384, 3
# One request, a pass in narrow columns, one in whole ones, and several passes a step.
BATCHES = (1, 3, 8, 33)
MAX_BATCH = 64  # of `kernel_variants.jobs`
CLEAN = "nothing found"
FINDINGS = 86  # exit status where a tool has found something; another one is the program's own

# Instrumented kernels are a thousand times slower.
PATIENT = Deadline(startup_s=600.0, steady_s=600.0)


def walk() -> None:
    """Greedy and sampled, with logits and without, in passes of every kind."""
    device = torch.device("cuda", torch.cuda.current_device())
    generator = torch.Generator().manual_seed(1)
    w1, w2 = (torch.randint(-4, 5, (VOCAB_SIZE, 256), generator=generator).div(8.0).bfloat16() for _ in range(2))
    head = MarkovHead(w1.to(device), w2.to(device))
    base = torch.randn(max(BATCHES), GAMMA, VOCAB_SIZE, generator=generator).bfloat16().to(device)
    anchors = torch.arange(max(BATCHES), device=device)
    temperatures = (anchors % 2).float()
    with WalkRuntime(head, MAX_BATCH, GAMMA, device=device, plans=[*PLANS], deadline=PATIENT) as runtime:
        for plan, definition in PLANS.items():
            for batch in BATCHES:
                for sampled in (False, True):
                    given = temperatures[:batch] if sampled else None
                    arguments = base[:batch], anchors[:batch], given, Noise(5, 0)
                    mode: LogitsMode = "local" if batch == BATCHES[-2] else "none"
                    walked = runtime.walk(*arguments, plan, mode)
                    torch.cuda.synchronize(device)
                    runtime.check()
                    # The definition reads what it leaves alone, even where that is nothing: initcheck would tell.
                    right = WalkOutput(torch.zeros_like(walked.tokens))
                    if not torch.equal(walked.tokens, runtime.walk(*arguments, definition, out=right).tokens):
                        sys.exit(f"plan {plan}, batch {batch}, sampled {sampled}: wrong tokens")


class Check:
    """A tool at work on the walks."""

    def __init__(self, sanitizer: str, tool: str, folder: Path) -> None:
        self.tool = tool
        self.said = folder / f"{tool}.txt"
        command = [sanitizer, "--tool", tool, "--error-exitcode", str(FINDINGS), "--print-limit", "20"]
        # Python's CUDA bindings ask the driver for functions that it may not have, which isn't the kernels' affair.
        command += ["--report-api-errors", "no"] if tool == "memcheck" else []
        if tool != "initcheck":  # which must see who writes what these kernels read
            command += ["--kernel-name", "kns=walk,kns=certify"]
        # Each tensor an allocation of its own, so that an access beside it is one beside an allocation.
        variables = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        walks = [sys.executable, __file__, "--walk", TOOLS[tool]]
        with self.said.open("wb") as said:
            self._process = subprocess.Popen(
                [*command, *walks], env=variables, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
            )

    def outcome(self, until: float) -> str:
        """Once it has ended, or at `until`, a time.monotonic(), when it is killed."""
        try:
            status = self._process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)  # the tool, and what it runs
            self._process.wait()
            return "no end in time"
        return {0: CLEAN, FINDINGS: "found something"}.get(status, f"failed, exit status {status}")


@click.command()
@click.option("--tool", "tools", type=click.Choice([*TOOLS]), multiple=True, default=[*TOOLS], show_default=True)
@click.option("--limit-seconds", type=float, default=150.0, show_default=True, help="Of all tools together.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), default=RESULT, help="File to write.")
@click.option("--walk", "build", type=click.Choice([*kernel_variants.VARIANTS]), help="Only walk, under no tool.")
def main(tools: Sequence[str], limit_seconds: float, out: Path, build: str | None) -> None:
    if build is not None:
        kernel_variants.use(build)
        walk()
        return
    sanitizer = shutil.which("compute-sanitizer", path=f"{os.environ.get('PATH', '')}:/usr/local/cuda/bin")
    if sanitizer is None:
        print("there is no compute-sanitizer on the PATH, nor in /usr/local/cuda/bin: nothing was checked")
        sys.exit(2)
    target = precompile.current_gpu()
    builds = sorted({TOOLS[tool] for tool in tools})
    plans = [*PLANS]
    precompile.compile_together(kernel_variants.jobs(builds, VOCAB_SIZE, 1, plans, target), target.arch)
    for each in builds:  # what is wrong without a tool
        subprocess.run([sys.executable, __file__, "--walk", each], timeout=limit_seconds, check=True)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        until = time.monotonic() + limit_seconds
        for check in [Check(sanitizer, tool, Path(folder)) for tool in tools]:
            outcome = check.outcome(until)
            if outcome != CLEAN:
                print(check.said.read_text(errors="replace"))
            print(f"{check.tool}: {outcome}", flush=True)
            rows.append({"tool": check.tool, "build": TOOLS[check.tool], "outcome": outcome})
    columns = Column("tool", "tool"), Column("build", "build"), Column("outcome", "outcome")
    ResultTable(
        "compute-sanitizer on walks by every kernel plan",
        f"Plans {', '.join(plans)}; batches {', '.join(map(str, BATCHES))}; greedy and sampled, "
        f"with local logits at {BATCHES[-2]}; V = {VOCAB_SIZE}, r = 256, γ = {GAMMA}, one rank.",
        environment(),
        columns,
        rows,
    ).write(out)
    sys.exit(any(row["outcome"] != CLEAN for row in rows))


if __name__ == "__main__":
    main()
