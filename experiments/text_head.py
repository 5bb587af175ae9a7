#!/usr/bin/env python3
"""Fits a Markov head to the bigrams of a corpus, and the base of a blind drafter for its walks to repair.

    python experiments/text_head.py [--text FILE …] [--out DIRECTORY]

The head is a factorisation of the positive pointwise mutual information of neighbouring tokens, so that W2 @ W1[p]
tells how much likelier each token is after p than elsewhere (Levy & Goldberg, Neural Word Embedding as Implicit Matrix
Factorization, NIPS 2014). Plain PPMI is largest where counts are smallest, and 256 dimensions go to accidents; rows and
columns are therefore weighted by the square root of their counts before the decomposition, and unweighted after it.

The base knows how often each token is k + 1 places after the anchor, and says a quarter of it: its drafts are weak, as
those of a drafter are that leaves the neighbours' influence to its head.

Writes a head in checkpoint format and blind_base.safetensors beside it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console

from tp_walk.blind_base import BlindBaseFit
from tp_walk.errors import WalkError, WalkInputError
from tp_walk.head import MarkovHead
from tp_walk.text import VOCAB_SIZE, Tokenizer, read_documents, split, standard_library, text_head_directory

# How much of the evidence the base speaks for. With all of it the base alone accepts more, and a walk adds less.
BASE_SHARE = 0.25
# A pair seen once is an accident: without these entries the base accepts as much, and is a third of the size.
LEAST_COUNT = 2
# Added to every id's count, so that one which the corpus lacks has a logit.
UNSEEN = 0.01
# γ that the checkpoint names; bigrams serve any.
BLOCK_SIZE = 7
# Extra columns and rounds of the randomised decomposition. Of the standard library's weighted information, 2 rounds
# explain 94.65 % and 4 rounds 94.73 %, in twice the time.
OVERSAMPLING, ROUNDS = 32, 2

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Stream:
    """A corpus as one stream. ids: those in use, ascending. tokens, document: of each place, its index in ids, and the
    number of the document that it is in.
    """

    ids: Integers
    tokens: Integers
    document: Integers

    @classmethod
    def of(cls, documents: Sequence[torch.Tensor]) -> Stream:
        ids, tokens = np.unique(torch.cat(list(documents)).numpy(), return_inverse=True)
        document = np.repeat(np.arange(len(documents)), [len(tokens) for tokens in documents])
        return cls(ids, tokens, document)

    def pairs(self, distance: int) -> tuple[Integers, Integers, Integers]:
        """(first, second, count) of the tokens `distance` places apart in a document, ordered by first, then second."""
        together = self.document[:-distance] == self.document[distance:]
        keys = self.tokens[:-distance][together] * len(self.ids) + self.tokens[distance:][together]
        pairs, counts = np.unique(keys, return_counts=True)
        return pairs // len(self.ids), pairs % len(self.ids), counts


def truncated_svd(matrix: Any, rank: int) -> tuple[Floats, Floats, Floats]:
    """u `[rows, rank]`, s `[rank]`, v `[columns, rank]` of a scipy sparse matrix, the largest singular values first.

    By subspace iteration from a random start: algorithm 4.4 of Halko, Martinsson & Tropp, Finding Structure with
    Randomness, SIAM Review 53 (2011). What a small matrix has no dimensions for is zero.
    """
    rows, columns = matrix.shape
    width = min(rank + OVERSAMPLING, rows, columns)
    image = matrix @ np.random.default_rng(0).standard_normal((columns, width), dtype=np.float32)
    for _ in range(ROUNDS):
        image = matrix @ np.linalg.qr(matrix.T @ np.linalg.qr(image)[0])[0]
    basis = np.linalg.qr(image)[0]
    u, s, vt = np.linalg.svd((matrix.T @ basis).T, full_matrices=False)
    kept = min(rank, width)
    padding = ((0, 0), (0, rank - kept))
    return np.pad((basis @ u)[:, :kept], padding), np.pad(s[:kept], padding[1]), np.pad(vt[:kept].T, padding)


def fit_head(stream: Stream, vocab_size: int, rank: int) -> MarkovHead:
    """The head of a stream's bigrams; tokens that the stream lacks have zero rows."""
    from scipy import sparse

    first, second, count = stream.pairs(1)
    size = len(stream.ids)
    as_first = np.bincount(first, count, minlength=size)
    as_second = np.bincount(second, count, minlength=size)
    information = np.log(count * count.sum() / (as_first[first] * as_second[second]))
    row_weight, column_weight = np.sqrt(np.maximum(as_first, 1)), np.sqrt(np.maximum(as_second, 1))
    weighted = np.maximum(information, 0) * row_weight[first] * column_weight[second]
    u, s, v = truncated_svd(sparse.csr_matrix((weighted.astype(np.float32), (first, second)), (size, size)), rank)
    w1, w2 = (torch.zeros(vocab_size, rank, dtype=torch.bfloat16) for _ in range(2))
    ids = torch.from_numpy(stream.ids)
    w1[ids] = torch.from_numpy(u * np.sqrt(s) / row_weight[:, None]).bfloat16()
    w2[ids] = torch.from_numpy(v * np.sqrt(s) / column_weight[:, None]).bfloat16()
    return MarkovHead(w1, w2, block_size=BLOCK_SIZE)


def fit_base(
    stream: Stream, vocab_size: int, gamma: int, held_out: list[torch.Tensor], description: str
) -> BlindBaseFit:
    """The base for up to gamma steps.

    P(x | anchor, k) is Witten & Bell's mixture of what was seen k + 1 places after the anchor and of U, the unigrams:
    λ = kinds / (kinds + occurrences) goes to U. The evidence is BASE_SHARE · log(P / (λ U)), which is 0 for what wasn't
    seen; that all of a step's logits are off by log λ changes nothing.
    """
    counts = np.full(vocab_size, UNSEEN)
    counts[stream.ids] += np.bincount(stream.tokens)
    unigrams = counts / counts.sum()
    starts, ids, evidence = [np.zeros(1, dtype=np.int64)], [], []
    for step in range(gamma):
        first, second, count = stream.pairs(step + 1)
        kinds = np.bincount(first, minlength=len(stream.ids))
        # λ / (1 − λ) is kinds / occurrences, and a pair's share of the occurrences count / occurrences.
        ratio = count / (kinds[first] * unigrams[stream.ids[second]])
        kept = count >= LEAST_COUNT
        ids.append(stream.ids[second[kept]])
        evidence.append(BASE_SHARE * np.log1p(ratio[kept]))
        entries = np.zeros(vocab_size, dtype=np.int64)
        entries[stream.ids] = np.bincount(first[kept], minlength=len(stream.ids))
        starts.append(starts[-1][-1] + np.cumsum(entries))
    return BlindBaseFit(
        background=torch.from_numpy(np.log(unigrams)).float(),
        starts=torch.from_numpy(np.concatenate(starts)).int(),
        ids=torch.from_numpy(np.concatenate(ids)).int(),
        evidence=torch.from_numpy(np.concatenate(evidence)).half(),
        held_out=held_out,
        description=description,
    )


def fit_text_head(files: Sequence[Path], directory: Path, rank: int, gamma: int, report: Callable[[str], None]) -> None:
    """Reads, fits and writes. No files: the standard library. `report` is told each stage.

    Raises:
        WalkError: the extra `text` isn't installed, a file can't be read, or there is too little text.
    """
    tokenizer = Tokenizer()
    corpus = ", ".join(file.name for file in files) or f"Python {sys.version.split()[0]}'s standard library"
    report(f"reading {corpus}")
    texts = read_documents(files) if files else [f.read_text(errors="replace") for f in standard_library()]
    train, held_out = split([tokenizer.encode(text) for text in texts])
    shortest = 2 * (gamma + 1)
    train, held_out = ([d for d in part if len(d) >= shortest] for part in (train, held_out))
    if not train or not held_out:
        raise WalkInputError(f"{corpus}: too little text; a tenth of it must be {shortest} tokens or more")
    stream = Stream.of(train)
    size = f"{len(stream.tokens):,} tokens of {len(stream.ids):,} kinds"
    report(f"fitting a head of rank {rank} to {size}")
    head = fit_head(stream, VOCAB_SIZE, rank)
    report(f"counting what follows at 1 to {gamma} places")
    base = fit_base(stream, VOCAB_SIZE, gamma, held_out, f"{corpus}, {size}")
    base.write(directory)
    # Last, because its presence is how a finished fit is known.
    head.save_checkpoint(directory)
    report(f"written to {directory}")


@click.command(help=str(__doc__).partition("\n")[0])
@click.option("--text", "files", multiple=True, type=click.Path(path_type=Path), help="Text or JSON lines with turns.")
@click.option(
    "--out", type=click.Path(path_type=Path), help="Directory to write; by default the user's data directory."
)
@click.option("--rank", default=256, show_default=True, type=click.IntRange(1, 512))
@click.option("--gamma", default=16, show_default=True, type=click.IntRange(1, 64), help="Steps to fit the base for.")
def main(files: tuple[Path, ...], out: Path | None, rank: int, gamma: int) -> None:
    if files and out is None:
        raise click.UsageError("--text needs --out: the data directory's head is that of the standard library")
    console = Console(stderr=True)
    try:
        with console.status("") as status:

            def report(stage: str) -> None:
                status.update(f"text head: {stage}")
                console.print(f"text head: {stage}", highlight=False)

            fit_text_head(files, out or text_head_directory(), rank, gamma, report)
    except (WalkError, OSError, ImportError) as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()
