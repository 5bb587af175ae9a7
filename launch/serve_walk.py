#!/usr/bin/env python3
"""The main job: serves walks to requests that come and go, on every GPU of a host or on the CPU.

    torchrun --nproc-per-node 2 launch/serve_walk.py [--text FILE …] [--head CHECKPOINT]
    torchrun --nproc-per-node 2 launch/serve_walk.py --synthetic --vocab-size 151936 --gamma 7 --max-batch 8

Requests are positions in text. Each round the running ones are walked together, by the plan that auto_select chooses
for their number, from base logits of which each rank makes its own columns alone; the text itself tells which of the
drafted tokens a target model would have accepted. Without --text that is text which the head was not fitted to.

SIGINT or SIGTERM to a rank ends the job in order on all of them, with status 0. When torchrun gets the signal, it hands
it on and waits for them; its own status is then 1.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import click
import torch
import torch.distributed as dist
from rich.console import Console

import tp_walk
from tp_walk.blind_base import FILE_NAME, BlindBase, BlindBaseFit
from tp_walk.config import MAX_GAMMA, settings
from tp_walk.errors import WalkError, WalkInputError, WalkMismatch, WalkTimeout
from tp_walk.files import check_writable
from tp_walk.group import WalkGroup
from tp_walk.plan import PLAN_NAMES
from tp_walk.serving import ContinuousBatch, QualityMeter, Request, StopSignal, accepted_length
from tp_walk.serving_report import Draft, Progress, Report, Served
from tp_walk.text import Tokenizer, read_documents, text_head_directory
from tp_walk.topology import gpu_of, link_between

# Blocks to serve if neither --blocks nor --seconds says: on two cores of a CPU, at V = 151,936 and up to 8 requests,
# some twenty seconds of the reference; on GPUs a few seconds.
DEFAULT_BLOCKS = {"cpu": 160, "cuda": 20_000}
DEFAULT_GAMMA = 7
# Blocks that are held against the text and the base. More change little in the table; each costs a pass over the base.
MEASURED_BLOCKS = 4_096
# On a CPU, ranks share cores with everything else: what would be a hang on a GPU may be a busy machine.
DEADLINES = {"cpu": tp_walk.Deadline(steady_s=120.0), "cuda": tp_walk.Deadline()}
SEED = 17
SHOWN_DRAFTS, SHOWN_CONTEXT = 4, 24
FIT_SCRIPT = Path(__file__).resolve().parents[1] / "experiments" / "text_head.py"


@dataclass(frozen=True)
class Options:
    """The command line."""

    text: tuple[Path, ...]
    head: Path | None
    synthetic: bool
    vocab_size: int
    markov_rank: int
    blocks: int | None
    seconds: float | None
    gamma: int | None
    max_batch: int
    temperature: float | None
    plan: str | None
    json: Path | None


@click.command(help=str(__doc__).replace("    torchrun", "\b\n    torchrun", 1))
@click.option("--text", multiple=True, type=click.Path(path_type=Path), help="Text, or JSON lines (.jsonl) with turns.")
@click.option("--head", type=click.Path(path_type=Path), help="A head's checkpoint; by default one is fitted, once.")
@click.option("--synthetic", is_flag=True, help="Gaussian weights and base logits, and a batch that is always full.")
@click.option("--vocab-size", default=151_936, show_default=True, type=click.IntRange(1), help="Of synthetic work.")
@click.option("--markov-rank", default=256, show_default=True, type=click.IntRange(1), help="Of synthetic work.")
@click.option(
    "--blocks", type=click.IntRange(1), help="Stop after so many blocks.  [default: 160 on a CPU, else 20000]"
)
@click.option("--seconds", type=click.FloatRange(0, min_open=True), help="Stop after so many seconds.")
@click.option("--gamma", type=click.IntRange(1, MAX_GAMMA), help="Tokens drafted in a block.  [default: the head's]")
@click.option("--max-batch", default=8, show_default=True, type=click.IntRange(1), help="Most requests at a time.")
@click.option("--temperature", type=click.FloatRange(0), help="Of all requests.  [default: 0 and 1 by turns]")
@click.option("--plan", type=click.Choice(PLAN_NAMES), help="By default auto_select chooses for each batch.")
@click.option("--json", type=click.Path(path_type=Path), help="Write the results to this file.")
def parse(**given: Any) -> Options:
    options = Options(**given)
    if options.synthetic and (options.text or options.head):
        raise click.UsageError("--synthetic takes neither --text nor --head")
    if options.json is not None and not options.json.resolve().parent.is_dir():
        raise click.UsageError(f"--json {options.json}: there is no such folder")
    return options


class Base(Protocol):
    """A drafter's base logits, this rank's columns."""

    def logits(self, anchors: torch.Tensor, gamma: int) -> torch.Tensor:
        """`[batch, gamma, shard width]` bfloat16 on the device, for `[batch]` int64 anchors there."""
        ...


class SyntheticBase:
    """Gaussian base logits, a few rows of them by turns; each rank draws its own columns."""

    ROWS, DEVIATION = 64, 3.0

    def __init__(self, shard: tp_walk.Shard, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(SEED + shard.start)
        self._rows = torch.empty(self.ROWS, shard.width, dtype=torch.bfloat16, device=device)
        self._rows.normal_(0.0, self.DEVIATION, generator=generator)

    def logits(self, anchors: torch.Tensor, gamma: int) -> torch.Tensor:
        return self._rows[(anchors[:, None] + torch.arange(gamma, device=anchors.device)) % self.ROWS]


@dataclass(frozen=True)
class Work:
    """What is served, on the host. fit: of the base, None for synthetic work, which has no tokenizer either."""

    head: tp_walk.MarkovHead
    texts: list[torch.Tensor]
    gamma: int
    what: str
    fit: BlindBaseFit | None = None
    tokenizer: Tokenizer | None = None


def synthetic_work(options: Options) -> Work:
    generator = torch.Generator().manual_seed(SEED)
    size, rank = options.vocab_size, options.markov_rank
    # So that the bias has deviation 1.
    w1, w2 = (torch.randn(size, rank, generator=generator).mul_(rank**-0.25).bfloat16() for _ in range(2))
    texts = [torch.randint(size, (4096,), generator=generator) for _ in range(4)]
    return Work(tp_walk.MarkovHead(w1, w2), texts, options.gamma or DEFAULT_GAMMA, "synthetic requests")


def text_work(options: Options, control: WalkGroup, stop: StopSignal) -> Work | None:
    """Text, head and base; None where a signal came before they were there. Collective."""
    fitted = text_head_directory()

    def read() -> tuple[Tokenizer, list[torch.Tensor], tp_walk.MarkovHead | None]:
        tokenizer = Tokenizer()
        texts = [tokenizer.encode(text) for text in read_documents(options.text)]
        return tokenizer, texts, None if options.head is None else tp_walk.MarkovHead.from_checkpoint(options.head)

    def fit_once() -> None:
        if control.rank == 0 and not (fitted / "model.safetensors").exists():
            try:
                check_writable(fitted.parent)
            except OSError as error:
                raise WalkInputError(
                    f"the fitted head can't be kept in {fitted.parent} ({error}): TP_WALK_DATA_DIR names another folder"
                ) from error
            fit_text_head(fitted, stop)

    def load() -> Work:
        fit = BlindBaseFit.read(fitted if needs_fit or options.head is None else options.head)
        head = given or tp_walk.MarkovHead.from_checkpoint(fitted)
        size = len(fit.background)
        if head.vocab_size != size or head.d2t is not None:
            kind = "ids" if head.d2t is None else "draft ids"
            raise WalkInputError(f"head {options.head} has {head.vocab_size:,} {kind}, the tokenizer {size:,} ids")
        gamma = options.gamma or min(head.block_size or DEFAULT_GAMMA, fit.max_gamma)
        if gamma > fit.max_gamma:
            raise WalkInputError(f"--gamma is {gamma}; the base was fitted for {fit.max_gamma} steps at most")
        what = ", ".join(file.name for file in options.text) or f"held-out text of {fit.description}"
        return Work(head, texts or fit.held_out, gamma, what, fit, tokenizer)

    # What may be wrong with the command line is found out before the fit, which takes its time.
    tokenizer, texts, given = control.stage("reading of the input", read)
    needs_fit = options.head is None or not (options.head / FILE_NAME).exists()
    if needs_fit:
        control.stage("fit of the text head", fit_once)
        if stop.agreed(control, tp_walk.Deadline().startup_s):
            return None
    return control.stage("reading of the head", load)


def fit_text_head(directory: Path, stop: StopSignal) -> None:
    """Fits in a process of its own, which may use all cores and gives its memory back; ends it when stopped."""
    # torchrun holds each rank to one thread.
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    with subprocess.Popen([sys.executable, str(FIT_SCRIPT), "--out", str(directory)], env=environment) as process:
        while process.poll() is None:
            time.sleep(0.05)
            if stop.requested:
                process.terminate()
    if process.returncode and not stop.requested:
        raise WalkError(f"{FIT_SCRIPT.name} exited with status {process.returncode}")


def setup_of(runtime: tp_walk.WalkRuntime, work: Work, options: Options, control: WalkGroup) -> dict[str, Any]:
    """What runs where, for the first line and the JSON. Collective."""
    plan = runtime.auto_select(options.max_batch, work.gamma, options.temperature != 0)
    if options.plan is not None and settings().plan is None:
        plan = tp_walk.Plan(options.plan)
    machine, link = f"CPU, {os.cpu_count()} cores", "gloo"
    if runtime.device.type == "cuda":
        gpus = control.all_gather_object(gpu_of(runtime.device))
        machine = ", ".join(str(gpu) for gpu in gpus)
        link = str(link_between(gpus[0], gpus[1])) if len(gpus) > 1 else "none"
    deadline = DEADLINES[runtime.device.type]
    return {
        "world_size": runtime.world_size,
        "machine": machine,
        "link": link,
        "vocab_size": work.head.vocab_size,
        "markov_rank": work.head.markov_rank,
        "gamma": work.gamma,
        "max_batch": options.max_batch,
        "temperature": options.temperature,
        "work": work.what,
        "plan_of_a_full_batch": plan.name,
        "provenance": plan.provenance,
        "memory_bytes": runtime.stats()["memory_bytes"],
        "deadline_s": asdict(deadline),
    }


def setup_line(setup: dict[str, Any]) -> str:
    memory = ", ".join(f"{name} {held / 1e6:.0f} MB" for name, held in setup["memory_bytes"].items())
    deadline = setup["deadline_s"]
    return (
        f"{setup['world_size']} rank(s) on {setup['machine']}, link {setup['link']}; V {setup['vocab_size']:,}, "
        f"r {setup['markov_rank']}, γ {setup['gamma']}, up to {setup['max_batch']} requests; "
        f"plan {setup['plan_of_a_full_batch']} ({setup['provenance']}); a rank holds {memory}; "
        f"deadline {deadline['startup_s']:g} s, then {deadline['steady_s']:g} s; {setup['work']}"
    )


class Job:
    """One run of the main job, on this rank. Every method is a collective."""

    def __init__(self, options: Options, control: WalkGroup, device: torch.device, stop: StopSignal) -> None:
        self._options, self._control, self._device, self._stop = options, control, device, stop
        self._deadline = DEADLINES[device.type]
        self._drafts: list[Draft] = []

    def run(self, console: Console) -> None:
        options, control = self._options, self._control
        if options.synthetic:
            work = control.stage("making of weights", partial(synthetic_work, options))
        else:
            found = text_work(options, control, self._stop)
            if found is None:
                return
            work = found
        requests = ContinuousBatch(
            work.texts, options.max_batch, work.gamma, options.temperature, SEED, steady=options.synthetic
        )
        with tp_walk.WalkRuntime(
            work.head,
            max_batch=options.max_batch,
            max_gamma=work.gamma,
            group=dist.group.WORLD if control.world_size > 1 else None,
            device=self._device,
            plans=None if options.plan is None else (options.plan,),
            deadline=self._deadline,
        ) as runtime:
            setup = setup_of(runtime, work, options, control)
            console.print(setup_line(setup), highlight=False, soft_wrap=True)
            served = Served(work.gamma)
            meter = QualityMeter(control, runtime.shard, SEED, self._deadline.steady_s) if work.fit else None
            self._serve(runtime, work, requests, served, meter, console)
            counts = runtime.stats()["counts"]
        quality = {t: q.report() for t, q in sorted(meter.by_temperature.items())} if meter else {}
        report = Report(setup, served.report() | {"counts": counts}, quality, self._drafts)
        if self._stop.requested:
            console.print("stopped by a signal")
        report.print(console)
        if options.json is not None and control.rank == 0:
            report.write(options.json)

    def _serve(
        self,
        runtime: tp_walk.WalkRuntime,
        work: Work,
        requests: ContinuousBatch,
        served: Served,
        meter: QualityMeter | None,
        console: Console,
    ) -> None:
        options = self._options
        base: Base = (
            BlindBase(work.fit, runtime.shard, self._device) if work.fit else SyntheticBase(runtime.shard, self._device)
        )
        blocks = options.blocks or (None if options.seconds else DEFAULT_BLOCKS[self._device.type])
        offset = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._walk(runtime, base, requests.admit()[:1], work.gamma, offset)  # tables and kernels are made at the first
        begin = time.perf_counter()
        with Progress(console, served) as progress:
            while True:
                over = options.seconds is not None and served.seconds >= options.seconds
                done = blocks is not None and served.blocks >= blocks
                if self._stop.agreed(self._control, self._deadline.steady_s, over or done):
                    break
                running = requests.admit()
                logits, tokens, plan, walk_ms = self._walk(runtime, base, running, work.gamma, offset)
                if meter is not None and served.blocks < MEASURED_BLOCKS:
                    right = torch.tensor([request.continuation(work.gamma) for request in running])
                    meter.observe(logits, tokens, right, [request.temperature for request in running])
                self._keep(running, tokens.tolist(), work)
                requests.advance(tokens.tolist())
                served.add(len(running), plan, walk_ms)
                served.finished, served.seconds = requests.finished, time.perf_counter() - begin
                progress.update()

    def _walk(
        self,
        runtime: tp_walk.WalkRuntime,
        base: Base,
        running: list[Request],
        gamma: int,
        offset: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, str, float]:
        """Base logits of a round, its tokens on the host, the plan that ran, and the walk's ms."""
        anchors = torch.tensor([request.anchor for request in running], device=self._device)
        logits = base.logits(anchors, gamma)
        temperatures = noise = None
        if any(request.temperature > 0 for request in running):
            temperatures = torch.tensor([request.temperature for request in running], device=self._device)
            rows = torch.tensor([request.number for request in running], device=self._device)
            noise = tp_walk.Noise(SEED, offset, rows)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        begin = time.perf_counter()
        out = runtime.walk(logits, anchors, temperatures, noise, self._options.plan)
        tokens = out.tokens.cpu()
        walk_ms = 1e3 * (time.perf_counter() - begin)
        runtime.check()
        return logits, tokens, "" if out.plan is None else out.plan.name, walk_ms

    def _keep(self, running: list[Request], drafts: list[list[int]], work: Work) -> None:
        """Keeps a few drafts to be shown: the first ones, then the first ones that the text agrees with for a while."""
        if work.tokenizer is None:
            return
        decode = work.tokenizer.decode
        for request, draft in zip(running, drafts, strict=True):
            right = request.continuation(work.gamma)
            accepted = accepted_length(draft, right)
            if len(self._drafts) < SHOWN_DRAFTS and (len(self._drafts) < SHOWN_DRAFTS // 2 or accepted >= 2):
                before = request.text[max(0, request.position + 1 - SHOWN_CONTEXT) : request.position + 1]
                shown = Draft(
                    before=decode(before),
                    accepted=decode(draft[:accepted]),
                    rejected=decode(draft[accepted:]),
                    right=decode(right),
                    temperature=request.temperature,
                    accepted_tokens=accepted,
                )
                self._drafts.append(shown)


def choose_device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise WalkInputError(f"rank {local_rank} of this host has no GPU: there are {torch.cuda.device_count()}")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def main() -> int:
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    silent = contextlib.redirect_stdout(io.StringIO()) if rank else contextlib.nullcontext()
    console = Console(quiet=rank > 0)
    complaint: str | None = None
    with StopSignal() as stop:
        try:
            with silent:
                options = parse.main(prog_name="serve_walk.py", standalone_mode=False)
            if not isinstance(options, Options):
                return 0  # --help has been printed
        except click.ClickException as error:
            complaint = error.format_message()
        if world_size > 1:
            dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        control = WalkGroup(dist.group.WORLD if world_size > 1 else None, torch.device("cpu"))
        try:
            if complaint is None:
                device = control.stage(
                    "choice of the GPU", partial(choose_device, int(os.environ.get("LOCAL_RANK", "0")))
                )
                Job(options, control, device, stop).run(console)
        except (WalkTimeout, WalkMismatch) as error:
            # Other ranks may be gone, or wait elsewhere; whoever knows what happened says so, and waits for nobody.
            print(f"serve_walk: rank {rank}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        except (WalkError, OSError) as error:
            complaint = str(error)
        if complaint is not None and rank == 0:
            print(f"serve_walk: {complaint}", file=sys.stderr, flush=True)
        # torchrun ends the other ranks as soon as one has failed: not before the line is out.
        control.barrier()
        if world_size > 1:
            dist.destroy_process_group()
    return 0 if complaint is None else 2


if __name__ == "__main__":
    sys.exit(main())
