"""Text in, tokens out; the blind base and the fitted head are those of the counts."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import text_head
import torch
from scipy import sparse

from tp_walk.blind_base import FILE_NAME, BlindBase, BlindBaseFit
from tp_walk.errors import CheckpointError, WalkInputError
from tp_walk.shard import Shard
from tp_walk.text import HELD_OUT_EVERY, VOCAB_SIZE, Tokenizer, read_documents, split, standard_library

V = 11
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer()


@pytest.mark.parametrize("text", ["def f(x):\n    return x  # γ\n", "", "<|endoftext|> is text here", "naïve 日本 🙂"])
def test_text_survives_the_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids.dtype == torch.int64
    assert tokenizer.decode(ids.tolist()) == text


def test_ids_without_a_token_can_be_shown(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([VOCAB_SIZE - 1]) == "�"


def test_documents_of_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text('{"turns": ["not parsed"]}')
    (tmp_path / "b.jsonl").write_text('{"turns": ["one", "two"]}\n\n{"turns": ["three"], "id": 4}\n')
    documents = read_documents([tmp_path / "a.txt", tmp_path / "b.jsonl"])
    assert documents == ['{"turns": ["not parsed"]}', "one\n\ntwo", "three"]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("missing.txt", None, r"missing\.txt can't be read"),
        ("latin.txt", "caf\xe9".encode("latin-1"), r"latin\.txt isn't UTF-8"),
        ("a.jsonl", b'{"turns": ["x"]}\n{"turns"', r"a\.jsonl, line 2"),
        ("a.jsonl", b'{"text": "x"}', r"a\.jsonl, line 1"),
        ("a.jsonl", b'{"turns": [1]}', r"a\.jsonl, line 1"),
        ("a.jsonl", b"7", r"a\.jsonl, line 1"),
    ],
)
def test_unreadable_files(tmp_path: Path, name: str, content: bytes | None, says: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(WalkInputError, match=says):
        read_documents([tmp_path / name])


def test_the_standard_library_is_here() -> None:
    names = {file.name for file in standard_library()}
    assert {"argparse.py", "typing.py"} <= names
    assert not any("site-packages" in file.parts for file in standard_library())


@pytest.mark.parametrize("count", [1, 9, 10, 37])
def test_a_tenth_is_held_out(count: int) -> None:
    documents = [torch.arange(100) + 1000 * i for i in range(count)]
    train, held_out = split(documents)
    every = torch.cat(train + held_out)
    assert torch.equal(every.sort().values, torch.cat(documents))
    share = sum(map(len, held_out)) / len(every)
    assert 1 / (2 * HELD_OUT_EVERY) < share <= 1 / HELD_OUT_EVERY


def documents_of_two_kinds() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(2, 9, (40,), generator=generator) for _ in range(6)]


def test_pairs_are_those_of_a_document() -> None:
    stream = text_head.Stream.of([torch.tensor([5, 7, 5]), torch.tensor([7, 5, 7, 5])])
    first, second, count = stream.pairs(1)
    assert stream.ids.tolist() == [5, 7]
    assert list(zip(first.tolist(), second.tolist(), count.tolist(), strict=True)) == [(0, 1, 2), (1, 0, 3)]
    first, second, count = stream.pairs(2)
    assert list(zip(first.tolist(), second.tolist(), count.tolist(), strict=True)) == [(0, 0, 2), (1, 1, 1)]


@pytest.mark.parametrize(("rows", "columns", "rank"), [(60, 50, 6), (5, 8, 12)])
def test_truncated_svd(rows: int, columns: int, rank: int) -> None:
    rng = np.random.default_rng(1)
    dense = (rng.standard_normal((rows, 4)) @ rng.standard_normal((4, columns))).astype(np.float32)
    u, s, v = text_head.truncated_svd(sparse.csr_matrix(dense), rank)
    assert (u.shape, s.shape, v.shape) == ((rows, rank), (rank,), (columns, rank))
    np.testing.assert_allclose(u * s @ v.T, dense, atol=1e-4)
    np.testing.assert_allclose(s[:4], np.linalg.svd(dense, compute_uv=False)[:4], rtol=1e-4)


def test_the_head_is_the_information_of_its_bigrams() -> None:
    documents = documents_of_two_kinds()
    head = text_head.fit_head(text_head.Stream.of(documents), V, 16)
    assert (head.vocab_size, head.markov_rank, head.block_size) == (V, 16, 7)
    counts = torch.zeros(V, V, dtype=torch.float64)
    for document in documents:
        counts.index_put_((document[:-1], document[1:]), torch.ones(len(document) - 1).double(), accumulate=True)
    information = (
        (counts * counts.sum() / (counts.sum(1, keepdim=True) * counts.sum(0))).log().clamp(min=0).nan_to_num()
    )
    bias = head.w1.double() @ head.w2_rows(0, V).double().T
    torch.testing.assert_close(bias, information, atol=0.03, rtol=0.02)


def fitted_base(gamma: int = 3) -> tuple[list[torch.Tensor], BlindBaseFit]:
    documents = documents_of_two_kinds()
    stream = text_head.Stream.of(documents)
    return documents, text_head.fit_base(stream, V, gamma, [torch.arange(5), torch.arange(2)], "a test")


def test_the_base_is_the_evidence_of_the_anchor() -> None:
    documents, fit = fitted_base()
    base = BlindBase(fit, Shard(0, V), CPU)
    assert (base.vocab_size, base.max_gamma) == (V, 3)
    anchors = torch.tensor([4, 10, 8])  # 10 isn't in the corpus
    logits = base.logits(anchors, 3)
    assert logits.dtype == torch.bfloat16
    total = sum(len(document) for document in documents) + V * text_head.UNSEEN
    for row, anchor in enumerate(anchors.tolist()):
        for step in range(3):
            after = [
                int(document[i + step + 1])
                for document in documents
                for i in range(len(document) - step - 1)
                if int(document[i]) == anchor
            ]
            for token in range(V):
                unigram = (sum(int((d == token).sum()) for d in documents) + text_head.UNSEEN) / total
                count, kinds = after.count(token), len(set(after))
                evidence = math.log1p(count / (kinds * unigram)) if count >= text_head.LEAST_COUNT else 0.0
                expected = math.log(unigram) + text_head.BASE_SHARE * evidence
                assert float(logits[row, step, token]) == pytest.approx(expected, rel=2**-8, abs=2e-3)


def test_shards_of_the_base_are_its_columns() -> None:
    _, fit = fitted_base()
    anchors = torch.tensor([3, 8, 0, 3])
    whole = BlindBase(fit, Shard(0, V), CPU).logits(anchors, 2)
    parts = [BlindBase(fit, Shard(a, b), CPU).logits(anchors, 2) for a, b in ((0, 4), (4, 4), (4, 8), (8, V))]
    assert torch.equal(torch.cat(parts, -1), whole)


def test_more_steps_than_were_fitted() -> None:
    with pytest.raises(WalkInputError, match="gamma is 4; this blind base was fitted for 3"):
        BlindBase(fitted_base()[1], Shard(0, V), CPU).logits(torch.tensor([1]), 4)


def test_a_base_written_and_read(tmp_path: Path) -> None:
    fit = fitted_base()[1]
    fit.write(tmp_path)
    read = BlindBaseFit.read(tmp_path)
    assert read.description == "a test"
    assert [document.tolist() for document in read.held_out] == [[0, 1, 2, 3, 4], [0, 1]]
    anchors = torch.arange(V)
    assert torch.equal(
        BlindBase(read, Shard(0, V), CPU).logits(anchors, 3), BlindBase(fit, Shard(0, V), CPU).logits(anchors, 3)
    )


def test_files_that_are_no_base(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"{FILE_NAME}: no such file"):
        BlindBaseFit.read(tmp_path)
    fit = fitted_base()[1]
    fit.write(tmp_path)
    file = tmp_path / FILE_NAME
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match="truncated or corrupt"):
        BlindBaseFit.read(tmp_path)
    BlindBaseFit(fit.background, fit.starts[:-1], fit.ids, fit.evidence, fit.held_out, "").write(tmp_path)
    with pytest.raises(CheckpointError, match="tensor starts: found 33 entries"):
        BlindBaseFit.read(tmp_path)


def test_fit_from_files(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("one two three four five six seven eight nine ten\n" * 30)
    stages: list[str] = []
    text_head.fit_text_head([text], tmp_path / "out", 8, 2, stages.append)
    assert stages[0] == "reading text.txt"
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        FILE_NAME,
        "config.json",
        "model.safetensors",
    ]
    assert "text.txt, " in BlindBaseFit.read(tmp_path / "out").description
    text.write_text("too little")
    with pytest.raises(WalkInputError, match="too little text"):
        text_head.fit_text_head([text], tmp_path / "none", 8, 2, stages.append)
    assert not (tmp_path / "none").exists()
