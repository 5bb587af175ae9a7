"""`torch.ops.tp_walk.walk`: WalkRuntime.walk as an operator, for engines that trace their model with torch.compile."""

from __future__ import annotations

import torch
from torch import library

from tp_walk.config import LogitsMode, LogitsRows
from tp_walk.noise import Noise
from tp_walk.runtime import open_runtime

# The runtime goes by its handle, and outputs that weren't asked for are empty: a schema knows neither objects nor
# optional results. The offset is marked as written, so that a compiler keeps walks in order.
library.define(
    "tp_walk::walk",
    "(int runtime, Tensor base_logits, Tensor anchors, Tensor? temperatures=None, Tensor? key=None, "
    "Tensor(a!)? offset=None, Tensor? rows=None, str? plan=None, str logits='none', str logits_rows='all', "
    "Tensor? num_valid=None, bool lse=False) -> (Tensor tokens, Tensor logits, Tensor lse)",
)


@library.impl("tp_walk::walk", "CompositeExplicitAutograd")
def _walk(
    runtime: int,
    base_logits: torch.Tensor,
    anchors: torch.Tensor,
    temperatures: torch.Tensor | None = None,
    key: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    plan: str | None = None,
    logits: LogitsMode = "none",
    logits_rows: LogitsRows = "all",
    num_valid: torch.Tensor | None = None,
    lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """WalkRuntime.walk of the runtime with this handle; the noise in parts, as device tensors."""
    noise = None if key is None or offset is None else Noise(key, offset, rows)
    walker = open_runtime(runtime)
    out = walker.walk(
        base_logits,
        anchors,
        temperatures,
        noise=noise,
        plan=plan,
        logits=logits,
        logits_rows=logits_rows,
        num_valid=num_valid,
        lse=lse,
    )
    return (
        out.tokens,
        base_logits.new_empty(0, dtype=walker.logits_dtype) if out.logits is None else out.logits,
        base_logits.new_empty(0, dtype=torch.float32) if out.lse is None else out.lse,
    )


def _fake_walk(
    runtime: int,
    base_logits: torch.Tensor,
    anchors: torch.Tensor,
    temperatures: torch.Tensor | None = None,
    key: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    plan: str | None = None,
    logits: LogitsMode = "none",
    logits_rows: LogitsRows = "all",
    num_valid: torch.Tensor | None = None,
    lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Shapes and dtypes of `_walk`'s results."""
    walker = open_runtime(runtime)
    batch, gamma = base_logits.shape[:2]
    wide = () if logits == "none" else (batch, gamma, walker.logits_width(logits))
    return (
        base_logits.new_empty((batch, gamma), dtype=torch.int64),
        base_logits.new_empty(wide or 0, dtype=walker.logits_dtype),
        base_logits.new_empty((batch, gamma) if lse else 0, dtype=torch.float32),
    )


library.register_fake("tp_walk::walk", _fake_walk)
