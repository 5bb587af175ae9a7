"""Does compute-sanitizer find anything in the walk kernels?

    python experiments/sanitize.py [--tool racecheck ...] [--limit-seconds 150]

Each tool runs small walks of a world of one in a process of its own, which also compares their tokens with the
definition's. The exit status is 1 if a tool finds something or doesn't end in time, 2 where there is no
compute-sanitizer (it comes with the CUDA toolkit).
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence

import click
import torch

from tp_walk import Deadline, MarkovHead, Noise, WalkOutput, WalkRuntime, precompile
from tp_walk.config import LogitsMode

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
# Rows of a multiple of 16 bytes: the copy engine moves whole 16-byte pieces, and memcheck takes the end of an
# allocation for the end of what was asked for, not of what CUDA hands out.
VOCAB_SIZE, GAMMA = 2384, 3
# A pass in narrow columns, one in whole ones, and several passes a step.
BATCHES = (3, 8, 33)
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
    plans = {"tp_bf16": "reference", "int8": "reference_int8", "certified": "reference"}
    with WalkRuntime(head, max(BATCHES), GAMMA, device=device, plans=[*plans], deadline=PATIENT) as runtime:
        for plan, definition in plans.items():
            for batch in BATCHES:
                for sampled in (False, True):
                    given = temperatures[:batch] if sampled else None
                    arguments = base[:batch], anchors[:batch], given, Noise(5, 0)
                    mode: LogitsMode = "local" if batch == BATCHES[1] else "none"
                    walked = runtime.walk(*arguments, plan, mode)
                    torch.cuda.synchronize(device)
                    runtime.check()
                    # The definition reads what it leaves alone, even where that is nothing: initcheck would tell.
                    right = WalkOutput(torch.zeros_like(walked.tokens))
                    if not torch.equal(walked.tokens, runtime.walk(*arguments, definition, out=right).tokens):
                        sys.exit(f"plan {plan}, batch {batch}, sampled {sampled}: wrong tokens")


def run(sanitizer: str, tool: str, limit_s: float) -> bool:
    """Runs the walks under a tool, which prints what it finds; whether that is nothing."""
    command = [sanitizer, "--tool", tool, "--error-exitcode", str(FINDINGS), "--print-limit", "20"]
    if tool != "initcheck":  # which must see who writes what these kernels read
        command += ["--kernel-name", "kns=walk,kns=certify"]
    # Each tensor an allocation of its own, so that an access beside it is one beside an allocation.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    process = subprocess.Popen([*command, sys.executable, __file__, "--walk"], env=environment, start_new_session=True)
    try:
        status = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the tool, and what it runs
        process.wait()
        print(f"{tool}: NO END within {limit_s:.0f} s", flush=True)
        return False
    outcome = {0: "nothing found", FINDINGS: "FOUND SOMETHING"}.get(status, f"FAILED, exit status {status}")
    print(f"{tool}: {outcome}", flush=True)
    return status == 0


@click.command()
@click.option("--tool", "tools", type=click.Choice(TOOLS), multiple=True, default=TOOLS, show_default=True)
@click.option("--limit-seconds", type=float, default=150.0, show_default=True, help="Of each tool.")
@click.option("--walk", "only_walk", is_flag=True, help="Only walk, under no tool.")
def main(tools: Sequence[str], limit_seconds: float, only_walk: bool) -> None:
    if only_walk:
        walk()
        return
    sanitizer = shutil.which("compute-sanitizer", path=f"{os.environ.get('PATH', '')}:/usr/local/cuda/bin")
    if sanitizer is None:
        print("there is no compute-sanitizer on the PATH, nor in /usr/local/cuda/bin: nothing was checked")
        sys.exit(2)
    target = precompile.current_gpu()
    precompile.compile_together(precompile.jobs(VOCAB_SIZE, 256, [1], max(BATCHES), ["engine"], target), target.arch)
    subprocess.run([sys.executable, __file__, "--walk"], timeout=limit_seconds, check=True)  # what is wrong without
    clean = [run(sanitizer, tool, limit_seconds) for tool in tools]
    sys.exit(not all(clean))


if __name__ == "__main__":
    main()
