"""The README's example runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import torch

import tp_walk

README = Path(__file__).resolve().parents[1] / "README.md"


def test_the_example_runs_inside_an_engine(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    generator = torch.Generator().manual_seed(7)
    w1, w2 = (torch.randn(64, 8, generator=generator).bfloat16() for _ in range(2))
    tp_walk.MarkovHead(w1, w2).save_checkpoint(tmp_path / "head.safetensors")
    engine = {
        "checkpoint": tmp_path / "head.safetensors",
        "tensor_parallel_group": None,  # a world of one
        "device": "cpu",
        "base_logits": torch.randn(4, 7, 64, generator=generator).bfloat16(),
        "anchors": torch.arange(4),
        "temperatures": torch.tensor([0.0, 1.0, 0.5, 0.0]),
        "seed": 3,
        "offset": torch.zeros(1, dtype=torch.int64),
    }
    exec(compile(example, str(README), "exec"), engine)
    assert engine["out"].tokens.shape == (4, 7)
    assert engine["out"].plan.name == engine["plan"].name
    assert engine["offset"].tolist() == [1]
    engine["runtime"].close()
