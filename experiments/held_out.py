"""Blocks at random places of text that a head wasn't fitted to, what is drafted there, and intervals for its means.

Shared by the experiments on real text. Only ids that the corpus uses are candidates: the others have zero rows in W2,
and base logits of log(0.01 / tokens), which leave them less than a thousandth of the draws at T = 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import numpy.typing as npt
import torch
from rich.progress import track

from tp_walk.blind_base import BlindBase, BlindBaseFit
from tp_walk.errors import WalkError
from tp_walk.head import MarkovHead
from tp_walk.results import ResultTable
from tp_walk.shard import Shard
from tp_walk.text import text_head_directory

GAMMA, CHUNK, RESAMPLES, SEED = 7, 50, 2000, 5

# u `[batch, r]` bf16 → the bias `[batch, rows]` float32.
Bias = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Drafts:
    """tokens: `[blocks, gamma]` ids. base_ranks: how many ids each step's base logits alone hold likelier."""

    tokens: torch.Tensor
    base_ranks: torch.Tensor


@dataclass(frozen=True)
class HeldOutText:
    """used: `[n]` ids of the corpus. w2: their rows. places: (document, position) of each anchor. description: of the
    corpus, for people.
    """

    head: MarkovHead
    base: BlindBase
    used: torch.Tensor
    w2: torch.Tensor
    documents: list[torch.Tensor]
    places: list[tuple[int, int]]
    description: str

    @classmethod
    def at_random(cls, directory: Path, blocks: int) -> HeldOutText:
        """Places in the text that experiments/text_head.py held out. Raises CheckpointError if it hasn't been run."""
        head, fit = MarkovHead.from_checkpoint(directory), BlindBaseFit.read(directory)
        w2 = head.w2_rows(0, head.vocab_size)
        used = w2.any(1).nonzero()[:, 0]
        base = BlindBase(fit, Shard(0, head.vocab_size), torch.device("cpu"))
        ends = np.cumsum([len(document) - GAMMA for document in fit.held_out])
        picks = np.random.default_rng(SEED).choice(int(ends[-1]), blocks, replace=False)
        which = np.searchsorted(ends, picks, side="right")
        begins = np.concatenate(([0], ends))[which]
        places = list(zip(which.tolist(), (picks - begins).tolist(), strict=True))
        return cls(head, base, used, w2[used], fit.held_out, places, fit.description)

    def anchors(self) -> torch.Tensor:
        """`[blocks]` ids."""
        return torch.stack([self.documents[document][position] for document, position in self.places])

    def continuations(self) -> torch.Tensor:
        """`[blocks, gamma]` ids: the text's own after each anchor."""
        after = (self.documents[d][position + 1 : position + 1 + GAMMA] for d, position in self.places)
        return torch.stack(list(after))

    def accepted(self, drafts: Drafts) -> npt.NDArray[np.float64]:
        """`[blocks]`: how many tokens of each draft, from its first on, are the text's own."""
        lengths: npt.NDArray[np.float64] = (drafts.tokens == self.continuations()).cumprod(1).sum(1).double().numpy()
        return lengths

    def drafts(self, biases: Mapping[str, Bias], temperature: float) -> dict[str, Drafts]:
        """What each way to compute the bias drafts, at a temperature (0: greedy), all with the same noise.

        The rounding is that of engines: the bias and the sum to bf16.
        """
        parts: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {name: [] for name in biases}
        generator = torch.Generator().manual_seed(SEED)
        every = self.anchors()
        for first in track(range(0, len(every), CHUNK), f"T = {temperature:g}", transient=True):
            anchors = every[first : first + CHUNK]
            base = self.base.logits(anchors, GAMMA)[..., self.used].float()
            noise = torch.zeros(())
            if temperature > 0:
                noise = -torch.empty_like(base).exponential_(generator=generator).log_()
            for name, bias in biases.items():
                previous, steps = anchors, []
                for step in range(GAMMA):
                    values = (base[:, step] + bias(self.head.w1[previous]).bfloat16().float()).bfloat16().float()
                    if temperature > 0:
                        values = values / temperature + noise[:, step]
                    choice = values.argmax(-1, keepdim=True)
                    rank = (base[:, step] > base[:, step].gather(1, choice)).sum(1)
                    previous = self.used[choice[:, 0]]
                    steps.append((previous, rank))
                tokens, ranks = zip(*steps, strict=True)
                parts[name].append((torch.stack(tokens, 1), torch.stack(ranks, 1)))
        return {
            name: Drafts(*(torch.cat(chunks) for chunks in zip(*several, strict=True)))
            for name, several in parts.items()
        }


def interval(values: npt.NDArray[np.float64]) -> tuple[float, float, float]:
    """The mean of the blocks' values, and the middle 95 % of the means of blocks drawn again with replacement."""
    draws = np.random.default_rng(SEED).integers(0, len(values), (RESAMPLES, len(values)))
    low, high = np.quantile(values[draws].mean(1), (0.025, 0.975))
    return float(values.mean()), float(low), float(high)


def with_interval(found: tuple[float, float, float], digits: int) -> str:
    mean, low, high = (f"{value:.{digits}f}" for value in found)
    return f"{mean} ({low} to {high})"


def command(
    measure: Callable[[Path, int], ResultTable],
    result: Path,
    help_text: str | None,
    blocks: int = 4000,
    draw: Callable[[ResultTable, Path], None] | None = None,
) -> click.Command:
    """That of an experiment.

    measure: of a head's directory and a number of blocks, `blocks` if none is given; a WalkError is one for want of a
    head. result: the file that is written if no other one is named. help_text: its first line is shown. draw: a chart
    of the table, into a file beside it.
    """
    default_blocks = blocks

    @click.command(help=str(help_text).partition("\n")[0])
    @click.option(
        "--blocks", default=default_blocks, show_default=True, type=click.IntRange(100), help="Blocks walked."
    )
    @click.option("--head", type=click.Path(path_type=Path), help="Directory of experiments/text_head.py; its default.")
    @click.option("--out", default=result, type=click.Path(path_type=Path), help="File to write.")
    def main(blocks: int, head: Path | None, out: Path) -> None:
        try:
            table = measure(head or text_head_directory(), blocks)
        except WalkError as error:
            raise click.ClickException(f"{error}; run experiments/text_head.py first") from error
        table.write(out)
        if draw is not None:
            draw(table, out.with_suffix(".svg"))
        click.echo(table.to_markdown())

    return main
