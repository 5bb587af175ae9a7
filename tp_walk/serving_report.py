"""What the main job tells: a line as it goes, tables and drafts at the end, and the same as JSON."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tp_walk.files import write_whole
from tp_walk.results import environment
from tp_walk.serving import TOP_SIZES, percentile

# Seconds between two lines where the output is no terminal.
_QUIET_S = 15.0
_REFRESH_S = 0.25


@dataclass(frozen=True)
class Draft:
    """A drafted block to show, as text: what was before it, its tokens, and the text's own."""

    before: str
    accepted: str
    rejected: str
    right: str
    temperature: float
    accepted_tokens: int


@dataclass
class Served:
    """Counts of a job. rounds: by batch and plan. walk_ms: of each round, from the call to the tokens on the host."""

    gamma: int
    blocks: int = 0
    finished: int = 0
    seconds: float = 0.0
    rounds: Counter[tuple[int, str]] = field(default_factory=Counter)
    walk_ms: list[float] = field(default_factory=list)

    def add(self, batch: int, plan: str, walk_ms: float) -> None:
        """Counts a round."""
        self.blocks += batch
        self.rounds[batch, plan] += 1
        self.walk_ms.append(walk_ms)

    def plans(self) -> dict[str, int]:
        """Rounds by plan, in the order in which plans were first used."""
        plans: Counter[str] = Counter()
        for (_, plan), count in self.rounds.items():
            plans[plan] += count
        return dict(plans)

    def report(self) -> dict[str, Any]:
        """The counts and what follows from them; None for what no round tells. batches: rounds by plan, of each."""
        rounds = len(self.walk_ms)
        batches: dict[str, dict[str, int]] = {}
        for (batch, plan), count in sorted(self.rounds.items()):
            batches.setdefault(str(batch), {})[plan] = count
        return {
            "blocks": self.blocks,
            "rounds": rounds,
            "requests_finished": self.finished,
            "seconds": self.seconds,
            "blocks_per_s": self.blocks / self.seconds if self.seconds else None,
            "drafted_tokens_per_s": self.blocks * self.gamma / self.seconds if self.seconds else None,
            "walk_p50_ms": percentile(self.walk_ms, 0.5) if rounds else None,
            "walk_p99_ms": percentile(self.walk_ms, 0.99) if rounds else None,
            "mean_batch": self.blocks / rounds if rounds else None,
            "batches": batches,
            "plans": self.plans(),
        }

    def line(self) -> str:
        """Where the job is, in a line."""
        here = self.report()
        return (
            f"{self.blocks:,} blocks, {here['blocks_per_s']:,.1f} blocks/s; "
            f"batch {here['mean_batch']:.1f}; {', '.join(here['plans'])}; "
            f"a walk {here['walk_p50_ms']:.3g} ms (p50), {here['walk_p99_ms']:.3g} ms (p99)"
        )


def plans_by_batch(batches: Mapping[str, Mapping[str, int]]) -> str:
    """Of `Served.report()`, in words: sizes that were walked share an entry with the next ones of the same plans."""
    entries: list[tuple[list[str], list[str]]] = []  # plans, and the sizes that they walked
    for size, rounds in batches.items():
        if entries and entries[-1][0] == list(rounds):
            entries[-1][1].append(size)
        else:
            entries.append((list(rounds), [size]))
    return ", ".join(
        f"{sizes[0]}{f' to {sizes[-1]}' if len(sizes) > 1 else ''}: {' and '.join(plans)}" for plans, sizes in entries
    )


class Progress:
    """Shows `served.line()` while the job runs: live on a terminal, now and then elsewhere. A context manager."""

    def __init__(self, console: Console, served: Served) -> None:
        self._console, self._served = console, served
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._every = _QUIET_S if self._live is None else _REFRESH_S
        self._next = time.monotonic() + self._every

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
        return self

    def update(self) -> None:
        """To be called once a round; does nothing until it is time for another line."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + self._every
        if self._live is not None:
            self._live.update(Text(self._served.line()), refresh=True)
        else:
            self._console.print(self._served.line(), highlight=False, soft_wrap=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()


@dataclass(frozen=True)
class Report:
    """The job's end. setup: what ran where. quality: by temperature, of `Quality.report`; none for synthetic work."""

    setup: Mapping[str, Any]
    served: Mapping[str, Any]
    quality: Mapping[float, Mapping[str, Any]]
    drafts: list[Draft]

    def write(self, path: Path) -> None:
        """Writes the JSON; a reader never sees half of it."""
        content = {
            "environment": environment(),
            "setup": self.setup,
            "served": self.served,
            "quality": {temperature_name(t): dict(quality) for t, quality in self.quality.items()},
            "drafts": [asdict(draft) for draft in self.drafts],
        }
        write_whole(path, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())

    def print(self, console: Console) -> None:
        """Prints the tables and the drafts."""
        console.print(self._served_table())
        if self.quality:
            console.print(self._quality_table())
        for draft in self.drafts:
            title = f"a draft, {temperature_name(draft.temperature)}, {draft.accepted_tokens} tokens accepted"
            console.rule(title, align="left", style="dim")
            text = Text(draft.before, style="dim", overflow="fold")
            # Brackets, because colours are lost where the output is no terminal.
            text.append("⟦" + draft.accepted, style="bold green").append("┊" + draft.rejected, style="red")
            console.print(text.append("⟧", style="red").append(f"  the text: {draft.right!r}", style="italic"))

    def _served_table(self) -> Table:
        table = Table("served", "", title="Served", title_justify="left", show_header=False)
        served = self.served
        table.add_row("blocks", f"{served['blocks']:,} in {served['rounds']:,} rounds, {served['seconds']:.1f} s")
        table.add_row("requests finished", f"{served['requests_finished']:,}")
        if served["rounds"]:
            table.add_row(
                "blocks/s, drafted tokens/s",
                f"{served['blocks_per_s']:,.1f}, {served['drafted_tokens_per_s']:,.1f}",
            )
            table.add_row("a walk, p50 / p99", f"{served['walk_p50_ms']:.3f} / {served['walk_p99_ms']:.3f} ms")
            sizes = [int(size) for size in served["batches"]]
            table.add_row("batch, mean (range)", f"{served['mean_batch']:.1f} ({min(sizes)} to {max(sizes)})")
            plans = ", ".join(f"{plan} {count:,}" for plan, count in served["plans"].items())
            table.add_row("plans, rounds", plans)
            table.add_row("plans by batch", plans_by_batch(served["batches"]))
        for plan, counts in served.get("counts", {}).items():
            table.add_row(
                f"{plan}, counted", ", ".join(f"{name.replace('_', ' ')} {n:,}" for name, n in counts.items())
            )
        return table

    def _quality_table(self) -> Table:
        table = Table(title="Against the text itself", title_justify="left")
        table.add_column("")
        for temperature in self.quality:
            table.add_column(temperature_name(temperature), justify="right")
        rows = {
            "blocks compared": ("{:,}", "blocks"),
            "tokens accepted a block, walk": ("{:.3f}", "accepted_with_walk"),
            "tokens accepted a block, base alone": ("{:.3f}", "accepted_without"),
            "tokens that match, walk": ("{:.1%}", "matching_with_walk"),
            "tokens that match, base alone": ("{:.1%}", "matching_without"),
        }
        for title, (form, key) in rows.items():
            table.add_row(title, *(form.format(quality[key]) for quality in self.quality.values()))
        for size in TOP_SIZES:
            shares = (f"{quality['chosen_in_top'][str(size)]:.1%}" for quality in self.quality.values())
            table.add_row(f"chosen is in the base's top {size}", *shares)
        return table


def temperature_name(temperature: float) -> str:
    """ "greedy", or "T = …"."""
    return f"T = {temperature:g}" if temperature > 0 else "greedy"
