#!/usr/bin/env python3
"""Packs a head and held-out blocks into one small file, for machines that have neither the text nor the fit.

    python experiments/text_head.py && python experiments/certified_blocks.py [--out build/certified_blocks.npz]

Weights are packed as int8 rows and evidence in 255 levels, so that the head is a little coarser than the fitted one;
what plans are compared on is the same for all of them.
"""

from __future__ import annotations

from pathlib import Path

import click
import numpy as np
import torch
from held_out import HeldOutText

from tp_walk.blind_base import BlindBaseFit
from tp_walk.errors import WalkError
from tp_walk.head import MarkovHead
from tp_walk.quantize import quantize_rows
from tp_walk.text import text_head_directory
from tp_walk.text_workload import TextBlocks

PACKED = Path(__file__).resolve().parents[1] / "build" / "certified_blocks.npz"


def pack(directory: Path, blocks: int, file: Path) -> int:
    """Writes the file; its size in bytes. Raises WalkError if there is no text head in the directory."""
    text, fit = HeldOutText.at_random(directory, blocks), BlindBaseFit.read(directory)
    vocab_size, gamma = len(fit.background), fit.max_gamma
    anchors = text.anchors()
    kinds = torch.unique(anchors)
    rows = (kinds[:, None] + vocab_size * torch.arange(gamma)).flatten()
    begins, counts = fit.starts[rows].long(), (fit.starts[rows + 1] - fit.starts[rows]).long()
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    entries = torch.arange(int(starts[-1])) + torch.repeat_interleave(begins - starts[:-1], counts)
    step = float(fit.evidence.float().max()) / 255
    arrays = {
        "used": text.used.int(),
        "anchors": anchors.int(),
        "kinds": kinds.int(),
        "background": fit.background,
        "starts": starts.int(),
        # Places among the ids in use, which fit 16 bits.
        "ids": torch.searchsorted(text.used, fit.ids[entries].long()),
        "evidence": (fit.evidence[entries].float() / step).round().to(torch.uint8),
        "step": torch.tensor(step),
    }
    for name, table in (("w1", text.head.w1[text.used]), ("w2", text.w2)):
        arrays[name], arrays[f"{name}_scales"] = quantize_rows(table)
    packed = {name: tensor.numpy() for name, tensor in arrays.items()}
    packed["ids"] = packed["ids"].astype(np.uint16)
    file.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(file, description=np.array(text.description), **packed)
    return file.stat().st_size


def unpack(file: Path) -> TextBlocks:
    """Reads what `pack` wrote. Raises OSError or KeyError where it isn't there."""
    with np.load(file) as packed:
        arrays = {name: packed[name] for name in packed.files}
    description = str(arrays.pop("description"))
    given = {name: torch.from_numpy(array) for name, array in arrays.items() if array.dtype != np.uint16}
    used, kinds = given["used"].long(), given["kinds"].long()
    vocab_size = len(given["background"])
    tables = []
    for name in ("w1", "w2"):
        table = torch.zeros(vocab_size, given[name].shape[1], dtype=torch.bfloat16)
        table[used] = (given[name].float() * given[f"{name}_scales"][:, None]).bfloat16()
        tables.append(table)
    starts = given["starts"].long()
    gamma = (len(starts) - 1) // len(kinds)
    # From the anchors' (kind, step) to the fit's (step, id), all others empty.
    order = (kinds[:, None] + vocab_size * torch.arange(gamma)).flatten()
    counts = torch.zeros(gamma * vocab_size, dtype=torch.int64)
    counts[order] = starts[1:] - starts[:-1]
    by_step = order.argsort()
    moved = torch.cat([torch.arange(a, b) for a, b in zip(starts[by_step], starts[by_step + 1], strict=True)])
    ids = used[torch.from_numpy(arrays["ids"].astype(np.int64))][moved]
    fit = BlindBaseFit(
        background=given["background"],
        starts=torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).int(),
        ids=ids.int(),
        evidence=(given["evidence"][moved].float() * given["step"]).half(),
        held_out=[],
        description=description,
    )
    return TextBlocks(MarkovHead(*tables), fit, given["anchors"].long())


@click.command(help=str(__doc__).partition("\n")[0])
@click.option("--blocks", default=2048, show_default=True, type=click.IntRange(64), help="Blocks packed.")
@click.option("--head", type=click.Path(path_type=Path), help="Directory of experiments/text_head.py; its default.")
@click.option("--out", default=PACKED, type=click.Path(path_type=Path), help="File to write.")
def main(blocks: int, head: Path | None, out: Path) -> None:
    try:
        size = pack(head or text_head_directory(), blocks, out)
    except WalkError as error:
        raise click.ClickException(f"{error}; run experiments/text_head.py first") from error
    click.echo(f"{out}: {blocks} blocks, {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
