"""MarkovHead in memory and from checkpoints: what is read, what is converted, what is refused and how it is named."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import tp_walk.checkpoint
from tp_walk.errors import CheckpointError, WalkInputError
from tp_walk.head import MarkovHead

V, R = 12, 4


def weights(rows: int = V, seed: int = 0, rank: int = R) -> torch.Tensor:
    return torch.randn(rows, rank, generator=torch.Generator().manual_seed(seed)).bfloat16()


def checkpoint(
    directory: Path,
    tensors: dict[str, torch.Tensor] | None = None,
    config: dict[str, Any] | None = None,
    file: str = "model.safetensors",
) -> Path:
    named = {"markov_head.markov_w1.weight": weights(), "markov_head.markov_w2.weight": weights(seed=1)}
    save_file(named if tensors is None else tensors, directory / file)
    if config is not None:
        (directory / "config.json").write_text(json.dumps(config))
    return directory


def refusal(path: Path, *parts: str) -> str:
    """Loads, expects a refusal, and checks that its message holds every part."""
    with pytest.raises(CheckpointError) as caught:
        MarkovHead.from_checkpoint(path)
    message = str(caught.value)
    for part in parts:
        assert part in message, f"{part!r} isn't in {message!r}"
    return message


def test_sizes_and_rows() -> None:
    w1, w2 = weights(20), weights(seed=1)
    head = MarkovHead(w1, w2)
    assert (head.vocab_size, head.target_vocab_size, head.markov_rank) == (V, 20, R)
    assert torch.equal(head.w1, w1)
    assert torch.equal(head.w2_rows(3, 7), w2[3:7])
    assert head.w2_rows(5, 5).shape == (0, R)


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (5, 4), (0, V + 1)])
def test_rows_outside_w2(start: int, stop: int) -> None:
    with pytest.raises(WalkInputError, match=re.escape(f"[{start}, {stop})")):
        MarkovHead(weights(), weights()).w2_rows(start, stop)


@pytest.mark.parametrize(
    ("w1", "w2", "d2t", "says"),
    [
        (weights().float(), weights(), None, "w1 is torch.float32"),
        (weights(), weights()[0], None, "w2 is torch.bfloat16 [4]"),
        (weights(), weights()[:0], None, "w2 is torch.bfloat16 [0, 4]"),
        (weights(), weights(rank=3), None, "w1 has 4 columns and w2 3"),
        (weights(5), weights(6), None, "w1 has 5 rows, w2 6"),
        (weights(), weights(6), torch.arange(6).int(), "d2t is torch.int32 [6]"),
        (weights(), weights(6), torch.arange(5), "d2t is torch.int64 [5]"),
        (weights(), weights(6), torch.arange(6) + 7, "ids from 7 to 12"),
        (weights(), weights(6), torch.arange(6) - 1, "ids from -1 to 4"),
    ],
)
def test_bad_tensors(w1: torch.Tensor, w2: torch.Tensor, d2t: torch.Tensor | None, says: str) -> None:
    with pytest.raises(WalkInputError, match=re.escape(says)):
        MarkovHead(w1, w2, d2t)


@pytest.mark.parametrize("mapped", [False, True])
def test_saved_and_read_back(tmp_path: Path, mapped: bool) -> None:
    d2t = torch.tensor([3, 4, 11, 19, 0, 7]) if mapped else None
    rows = 6 if mapped else V
    saved = MarkovHead(weights(20), weights(rows, seed=1), d2t, block_size=7)
    saved.save_checkpoint(tmp_path / "new" / "head")
    read = MarkovHead.from_checkpoint(tmp_path / "new" / "head")
    assert (read.vocab_size, read.target_vocab_size, read.markov_rank, read.block_size) == (rows, 20, R, 7)
    assert torch.equal(read.w1, saved.w1)
    assert torch.equal(read.w2_rows(0, rows), saved.w2_rows(0, rows))
    assert (read.d2t is None) if d2t is None else torch.equal(read.d2t, d2t)  # type: ignore[arg-type]
    assert sorted(file.name for file in (tmp_path / "new" / "head").iterdir()) == ["config.json", "model.safetensors"]


def test_saves_strided_and_shared_tensors(tmp_path: Path) -> None:
    table = weights(V, rank=2 * R)[:, ::2]
    MarkovHead(table, table).save_checkpoint(tmp_path)
    assert torch.equal(MarkovHead.from_checkpoint(tmp_path).w1, table)


def test_map_is_stored_as_a_difference(tmp_path: Path) -> None:
    tensors = {
        "markov_head.markov_w1.weight": weights(20),
        "markov_head.markov_w2.weight": weights(3, seed=1),
        "d2t": torch.tensor([5, 5, 8]),
    }
    head = MarkovHead.from_checkpoint(checkpoint(tmp_path, tensors, {"vocab_size": 20, "draft_vocab_size": 3}))
    assert head.d2t is not None
    assert head.d2t.dtype == torch.int64
    assert head.d2t.tolist() == [5, 6, 10]
    MarkovHead.from_checkpoint(tmp_path).save_checkpoint(tmp_path / "again")
    stored = tp_walk.checkpoint._read_headers(tmp_path / "again")[1]["d2t"]
    assert stored.rows(0, 3).tolist() == [5, 5, 8]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight"),
        ("mtp.2.markov_head.markov_w1.weight", "mtp.2.markov_head.markov_w2.weight"),
        ("mtp.0.markov_head.embed.weight", "mtp.0.markov_head.head.weight"),
        ("markov_head.embed", "markov_head.head"),
        ("markov_w1", "markov_w2"),
        ("markov_w1.weight", "markov_w2.weight"),
        ("model.markov_head.markov_w1.weight", "model.markov_head.markov_w2.weight"),
    ],
)
@pytest.mark.parametrize("kind", ["file", "directory", "index"])
def test_names_and_layouts(tmp_path: Path, first: str, second: str, kind: str) -> None:
    # Neighbours that are no part of the head: a target's own head and embedding, and the drafter's confidence head.
    others = {"mtp.0.head.weight": weights(3), "embed.weight": weights(3), "confidence_head.proj.weight": weights(1)}
    if kind == "index":
        save_file({first: weights(), **others}, tmp_path / "a.safetensors")
        save_file({second: weights(seed=1)}, tmp_path / "b.safetensors")
        where = {first: "a.safetensors", second: "b.safetensors"} | dict.fromkeys(others, "not-downloaded.safetensors")
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
        path = tmp_path
    else:
        checkpoint(tmp_path, {first: weights(), second: weights(seed=1), **others}, file="head.safetensors")
        path = tmp_path / "head.safetensors" if kind == "file" else tmp_path
    head = MarkovHead.from_checkpoint(path)
    assert torch.equal(head.w1, weights())
    assert torch.equal(head.w2_rows(0, V), weights(seed=1))


def test_a_rank_reads_and_holds_its_rows_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint(tmp_path)
    reads: list[tuple[str, slice]] = []
    really_open = tp_walk.checkpoint.safe_open

    class Recorder:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.handle = really_open(*args, **kwargs)

        def __enter__(self) -> Recorder:
            self.opened = self.handle.__enter__()
            return self

        def __exit__(self, *args: object) -> None:
            self.handle.__exit__(*args)

        def keys(self) -> list[str]:
            return list(self.opened.keys())

        def get_slice(self, name: str) -> Any:
            stored = self.opened.get_slice(name)

            class Slice:
                get_shape = staticmethod(stored.get_shape)
                get_dtype = staticmethod(stored.get_dtype)

                def __getitem__(self, rows: slice) -> torch.Tensor:
                    reads.append((name, rows))
                    return stored[rows]  # type: ignore[no-any-return]

            return Slice()

    monkeypatch.setattr(tp_walk.checkpoint, "safe_open", Recorder)
    head = MarkovHead.from_checkpoint(tmp_path)
    assert reads == []
    mine = head.w2_rows(4, 8)
    assert reads == [("markov_head.markov_w2.weight", slice(4, 8))]
    assert mine.untyped_storage().nbytes() == 4 * R * 2
    assert head.w1 is head.w1
    assert reads[1:] == [("markov_head.markov_w1.weight", slice(0, V))]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_floats_are_converted_with_a_notice(tmp_path: Path, dtype: torch.dtype) -> None:
    w2 = torch.randn(V, R, generator=torch.Generator().manual_seed(3)).to(dtype)
    checkpoint(tmp_path, {"markov_head.markov_w1.weight": weights(), "markov_head.markov_w2.weight": w2})
    with pytest.warns(UserWarning, match=r"markov_w2.weight is F(16|32); it is converted to BF16") as notices:
        head = MarkovHead.from_checkpoint(tmp_path)
    assert len(notices) == 1
    assert torch.equal(head.w2_rows(2, 9), w2[2:9].bfloat16())


def test_bfloat16_is_silent(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MarkovHead.from_checkpoint(checkpoint(tmp_path))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fn])
def test_other_dtypes_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {"markov_head.markov_w1.weight": weights(), "markov_head.markov_w2.weight": weights().to(dtype)}
    checkpoint(tmp_path, tensors)
    refusal(tmp_path, "model.safetensors", "markov_w2.weight", "expected BF16")


@pytest.mark.parametrize("key", ["markov_rank", "dspark_markov_rank"])
@pytest.mark.parametrize("nested", [None, "dspark_config", "text_config"])
def test_config_is_checked_against_the_weights(tmp_path: Path, key: str, nested: str | None) -> None:
    config: dict[str, Any] = {key: 8, "dspark_block_size": 16}
    checkpoint(tmp_path, config={nested: config, "model_type": "x"} if nested else config)
    refusal(tmp_path, "model.safetensors", "markov_w1.weight", "[12, 4]", "[vocabulary, 8]")
    config[key] = R
    checkpoint(tmp_path, config={nested: config} if nested else config)
    assert MarkovHead.from_checkpoint(tmp_path).block_size == 16


def test_the_prefixed_key_wins(tmp_path: Path) -> None:
    # A target's config.json that carries its drafter has keys of its own under the bare names.
    checkpoint(tmp_path, config={"block_size": 128, "dspark_block_size": 5})
    assert MarkovHead.from_checkpoint(tmp_path).block_size == 5


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        ({"vocab_size": 13}, ("markov_w1.weight", "12 rows", "13 (vocab_size) or more")),
        ({"draft_vocab_size": 11}, ("markov_w2.weight", "12 rows", "11 (draft_vocab_size)")),
        ({"markov_rank": 0}, ("config.json", "markov_rank", "0", "positive integer")),
        ({"markov_rank": "256"}, ("config.json", "markov_rank", "'256'", "positive integer")),
        ({"markov_rank": True}, ("config.json", "markov_rank", "True", "positive integer")),
        ({"block_size": 7.5}, ("config.json", "block_size", "7.5", "positive integer")),
        ({"markov_head_type": "gated"}, ("config.json", "markov_head_type", "'gated'", "'vanilla'")),
        ({"dspark_config": {"markov_head_type": "rnn"}}, ("markov_head_type", "'rnn'", "'vanilla'")),
        ({"dspark_markov_head_type": "gru"}, ("markov_head_type", "'gru'", "'vanilla'")),
        ({"markov_scale": 0.5}, ("markov_scale", "0.5", "transforms the bias")),
        ({"dspark_config": {"markov_softcap": 30.0}}, ("markov_softcap", "30.0", "transforms the bias")),
        ({"text_config": {"final_logit_softcapping": 30.0}}, ("final_logit_softcapping", "30.0")),
        ({"logit_scale": 0.0625}, ("logit_scale", "0.0625")),
        ({"markov_quantization": "fp8"}, ("markov_quantization", "'fp8'")),
        ({"markov_output_mode": "direct"}, ("markov_output_mode", "'direct'", "'additive'")),
        ({"markov_order": 2}, ("markov_order", "2")),
    ],
)
def test_refused_configs(tmp_path: Path, config: dict[str, Any], parts: tuple[str, ...]) -> None:
    refusal(checkpoint(tmp_path, config=config), *parts)


def test_neutral_configs_pass(tmp_path: Path) -> None:
    config = {"markov_head_type": "Vanilla", "logit_scale": 1.0, "final_logit_softcapping": None, "markov_order": 1}
    assert MarkovHead.from_checkpoint(checkpoint(tmp_path, config=config)).vocab_size == V


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (
            {"markov_head.markov_w2.weight": None},
            ("tensor markov_head.markov_w2.weight", "found markov_head.markov_w1"),
        ),
        ({"markov_head.markov_w1.weight": None}, ("tensor markov_head.markov_w1.weight",)),
        ({"markov_head.markov_w2.weight": weights(rank=3)}, ("markov_w2.weight", "3 columns", "expected 4")),
        ({"markov_head.markov_w2.weight": weights(13)}, ("markov_w2.weight", "13 rows and no d2t", "12 rows")),
        ({"markov_head.markov_w2.weight": weights()[0]}, ("markov_w2.weight", "shape [4]")),
        ({"markov_head.markov_w2.weight": weights(0)}, ("markov_w2.weight", "shape [0, 4]")),
        ({"markov_head.embed.weight": weights()}, ("several tensors for W1", "markov_head.embed.weight")),
        ({"mtp.1.markov_head.head.weight": weights()}, ("several tensors for W2", "mtp.1.markov_head.head.weight")),
        ({"markov_head.gate_proj.weight": weights()}, ("markov_head.gate_proj.weight", "another head type")),
        ({"markov_head.markov_w2.bias": weights()[:, 0].clone()}, ("markov_w2.bias", "another head type")),
        ({"markov_head.markov_w2.weight_scale": torch.ones(V)}, ("markov_w2.weight_scale", "F32", "quantises")),
        ({"markov_w2_qzeros": torch.ones(V)}, ("markov_w2_qzeros", "quantises")),
        ({"d2t": torch.zeros(V - 1, dtype=torch.int64)}, ("tensor d2t", "I64 [11]", "I64 [12]")),
        ({"d2t": torch.zeros(V)}, ("tensor d2t", "F32 [12]", "I64 [12]")),
        ({"d2t": torch.ones(V, dtype=torch.int64)}, ("tensor d2t", "target ids from 1 to 12", "[0, 12)")),
    ],
)
def test_refused_tensors(tmp_path: Path, change: dict[str, torch.Tensor | None], parts: tuple[str, ...]) -> None:
    tensors: dict[str, torch.Tensor | None] = {
        "markov_head.markov_w1.weight": weights(),
        "markov_head.markov_w2.weight": weights(seed=1),
    }
    checkpoint(tmp_path, {name: t for name, t in (tensors | change).items() if t is not None})
    refusal(tmp_path, str(tmp_path), *parts)


def test_a_draft_vocabulary_needs_its_map(tmp_path: Path) -> None:
    tensors = {"markov_w1": weights(20), "markov_w2": weights(8)}
    refusal(checkpoint(tmp_path, tensors, {"vocab_size": 20, "draft_vocab_size": 8}), "markov_w2", "8 rows and no d2t")


@pytest.mark.parametrize("kept", [0, 4, 40, -1])
def test_truncated_files(tmp_path: Path, kept: int) -> None:
    file = checkpoint(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    refusal(tmp_path, str(file), "truncated or corrupt")


def test_corrupt_header(tmp_path: Path) -> None:
    file = checkpoint(tmp_path) / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[8:30] = b"\xff" * 22
    file.write_bytes(data)
    refusal(tmp_path, str(file), "truncated or corrupt")


def test_a_file_that_changes_after_it_was_opened(tmp_path: Path) -> None:
    head = MarkovHead.from_checkpoint(checkpoint(tmp_path))
    checkpoint(tmp_path, {"markov_head.markov_w2.weight": weights(9)})
    with pytest.raises(CheckpointError, match=r"markov_w2.weight: found BF16 \[9, 4\], expected BF16 \[12, 4\]"):
        head.w2_rows(0, 4)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no such file"):
        head.w2_rows(0, 4)


def test_paths_that_hold_no_checkpoint(tmp_path: Path) -> None:
    refusal(tmp_path / "nowhere", "nowhere", "no such file or directory")
    refusal(tmp_path, "no .safetensors file")
    (tmp_path / "head.bin").write_bytes(b"")
    refusal(tmp_path / "head.bin", "head.bin", ".bin", "expected .safetensors")


@pytest.mark.parametrize(("text", "says"), [("{", "not readable as JSON"), ("[]", "found a JSON list")])
def test_broken_config(tmp_path: Path, text: str, says: str) -> None:
    checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(text)
    refusal(tmp_path, "config.json", says)


def test_broken_indexes(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("{}")
    refusal(tmp_path, index.name, "no weight_map")
    index.write_text(json.dumps({"weight_map": {"markov_w1": "gone.safetensors"}}))
    refusal(tmp_path, "gone.safetensors", "no such file")
    index.write_text(json.dumps({"weight_map": {"markov_w1": "model.safetensors"}}))
    refusal(tmp_path, "model.safetensors", "tensor markov_w1", "found nothing")
    (tmp_path / "other.safetensors.index.json").write_text("{}")
    refusal(tmp_path, "expected one index")


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    checkpoint(tmp_path, file="copy.safetensors")
    refusal(tmp_path, "model.safetensors", "also in copy.safetensors")


def test_tables_are_the_heads_own_or_copies() -> None:
    head, here = MarkovHead(weights(), weights(seed=1), d2t=torch.arange(V)), torch.device("cpu")
    for copy in (False, True):
        w1, d2t = head.tables_on(here, copy=copy)
        assert d2t is not None
        assert head.d2t is not None
        for table, own in ((w1, head.w1), (d2t, head.d2t)):
            assert torch.equal(table, own)
            assert (table.data_ptr() == own.data_ptr()) != copy
