"""Blocks of held-out text, what is drafted there, and the intervals of their means."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import text_head
import torch
import walk_quality
from held_out import GAMMA, HeldOutText, interval

import tp_walk
from tp_walk.blind_base import BlindBase, BlindBaseFit
from tp_walk.head import MarkovHead
from tp_walk.shard import Shard
from tp_walk.text import VOCAB_SIZE


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head fitted to numbers in a row."""
    folder = tmp_path_factory.mktemp("head")
    (folder / "text.txt").write_text("\n".join(str(number % 37) for number in range(3000)))
    text_head.fit_text_head([folder / "text.txt"], folder, 8, GAMMA, lambda stage: None)
    return folder


def test_the_interval_holds_the_mean_and_narrows() -> None:
    values = np.random.default_rng(0).standard_normal(400)
    mean, low, high = interval(values)
    assert low < mean == values.mean() < high
    # Two standard errors to each side, about.
    assert 0.15 < high - low < 0.25
    assert interval(np.full(10, 3.0)) == (3.0, 3.0, 3.0)


def test_places_are_held_out_text(directory: Path) -> None:
    found = HeldOutText.at_random(directory, 50)
    assert len(set(found.places)) == 50
    for (document, position), anchor, right in zip(found.places, found.anchors(), found.continuations(), strict=True):
        part = found.documents[document][position : position + GAMMA + 1]
        assert torch.equal(part, torch.cat((anchor[None], right)))


def test_greedy_drafts_are_the_runtimes(directory: Path) -> None:
    text = HeldOutText.at_random(directory, 6)
    w2 = text.w2.float()
    drafts = text.drafts({"walk": lambda u: u.float() @ w2.T}, 0.0)["walk"]
    base = BlindBase(BlindBaseFit.read(directory), Shard(0, VOCAB_SIZE), torch.device("cpu"))
    logits = base.logits(text.anchors(), GAMMA)
    with tp_walk.WalkRuntime(MarkovHead.from_checkpoint(directory), 8, GAMMA, device="cpu") as runtime:
        out = runtime.walk(logits, text.anchors(), plan="reference")
    assert torch.equal(drafts.tokens, out.tokens)
    chosen = logits.gather(2, out.tokens[..., None])
    assert torch.equal(drafts.base_ranks, (logits > chosen).sum(-1))


def test_all_ways_draw_the_same_noise(directory: Path) -> None:
    text = HeldOutText.at_random(directory, 60)
    w2 = text.w2.float()
    ways = {"one": lambda u: u.float() @ w2.T, "other": lambda u: u.float() @ w2.T}
    drafts = text.drafts(ways, 1.0)
    assert torch.equal(drafts["one"].tokens, drafts["other"].tokens)
    assert not torch.equal(drafts["one"].tokens, text.drafts(ways, 0.0)["one"].tokens)


def test_table_of_the_walk(directory: Path) -> None:
    table = walk_quality.measure(directory, 100)
    greedy, sampled = table.rows
    assert greedy["walk_low"] <= greedy["walk_accepted"] <= greedy["walk_high"]
    # With the token before it a digit's row is known; from the anchor alone it isn't.
    assert greedy["walk_accepted"] > greedy["base_accepted"]
    shares = [greedy[f"top_{size}_percent"] for size in walk_quality.TOP_SIZES]
    assert shares == sorted(shares)
    assert 0 < sampled["base_accepted"] < GAMMA
