"""A checkpoint's files → where a head's tensors are in them: names, index, config.json keys, and what is refused.

Only headers are read here, and the draft vocabulary's map. `head` reads the weights, some rows at a time.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from tp_walk.errors import CheckpointError

# safetensors' names of the element types, in the spelling of the file header.
_KEPT = "BF16"
_CONVERTED = ("F16", "F32")
_MAP_DTYPES = ("I64", "I32")

# `markov_head.markov_w1.weight`, `mtp.2.markov_head.embed.weight`, `markov_w1`: any prefix, either pair of names.
_WEIGHT = re.compile(r"(?:.+\.)?(?P<which>markov_w[12]|(?<=markov_head\.)(?:embed|head))(?:\.weight)?")
_WHICH = {"markov_w1": "W1", "embed": "W1", "markov_w2": "W2", "head": "W2"}

# Anything else that belongs to the head changes what it computes.
_OTHER_PART = re.compile(r"(?:.+\.)?(?:markov_head\.|markov_w[12]\.).+|(?:.+\.)?markov_w[12]_.+")
_QUANTISED = re.compile(r".*[._](?:scale|scales|scale_inv|weight_scale|zero_point|zeros|qweight|qzeros|g_idx)")

# Objects of config.json that may hold a head's keys, the most specific first.
_NESTED = ("dspark_config", "dflash_config", "text_config", "transformer_layer_config")

# config.json keys that transform the bias, and the values under which they leave it as it is.
_BIAS_TRANSFORMS: dict[str, tuple[object, ...]] = {
    "markov_scale": (None, 1),
    "markov_bias_scale": (None, 1),
    "markov_logit_scale": (None, 1),
    "markov_softcap": (None, 0),
    "markov_logit_softcap": (None, 0),
    "markov_quantization": (None, "none"),
    "markov_output_mode": (None, "additive"),
    "markov_order": (None, 1),
    "markov_hidden_gate": (None, False),
    # Engines run the bias through the model's own logits processor, so these reach it too.
    "logit_scale": (None, 1),
    "logits_scaling": (None, 1),
    "logit_softcap": (None, 0),
    "final_logit_softcapping": (None, 0),
}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a .safetensors file, read some rows at a time.

    Args:
        file: the .safetensors file.
        name: the tensor's name in it.
        shape: as the file's header gives it.
        dtype: safetensors' name of the element type (`"BF16"`, `"I64"`, …).
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Rows `[start, stop)` in memory of their own: the file can go, and no other row is read."""
        with opened(self.file) as handle:
            stored = handle.get_slice(self.name)
            if tuple(stored.get_shape()) != self.shape or stored.get_dtype() != self.dtype:
                was = f"{self.dtype} {list(self.shape)}, as when it was opened"
                raise self.fault(f"{stored.get_dtype()} {stored.get_shape()}", was)
            # The slice is a view of the mapped file and would keep all of it mapped.
            rows: torch.Tensor = stored[start:stop].clone()
            return rows

    def fault(self, found: str, expected: str) -> CheckpointError:
        return CheckpointError(f"{self.file}: tensor {self.name}: found {found}, expected {expected}")


@dataclass(frozen=True)
class StoredHead:
    """A checked head: `w1` and `w2` as they are stored, `d2t` as `[V]` int64 target ids, and config.json's γ."""

    w1: StoredTensor
    w2: StoredTensor
    d2t: torch.Tensor | None
    block_size: int | None


def find_head(path: Path) -> StoredHead:
    """The head of a checkpoint file or directory, checked from its headers; see `MarkovHead.from_checkpoint`."""
    directory, tensors = _read_headers(path)
    config = _Config.beside(directory)
    config.check_supported()
    w1, w2, d2t = _pick(path, tensors)
    _check_weights(w1, w2, config)
    stored = StoredHead(w1, w2, _target_ids(d2t, w1, w2, config), config.integer("block_size"))
    for weight in (w1, w2):
        if weight.dtype in _CONVERTED:
            message = f"{weight.file}: tensor {weight.name} is {weight.dtype}; it is converted to BF16"
            warnings.warn(message, stacklevel=3)
    return stored


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """A .safetensors file, open for reads of its tensors. Raises CheckpointError if it is missing or corrupt."""
    try:
        with safe_open(file, framework="pt") as handle:
            yield handle
    except FileNotFoundError as error:
        raise CheckpointError(f"{file}: no such file") from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: not a readable safetensors file, truncated or corrupt ({error})") from error


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: not readable as JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: found a JSON {type(value).__name__}, expected an object")
    return value


def _read_headers(path: Path) -> tuple[Path, dict[str, StoredTensor]]:
    """The directory that holds config.json, and every tensor that could belong to the head, by name."""
    if path.is_file():
        if path.suffix != ".safetensors":
            raise CheckpointError(f"{path}: found a {path.suffix or 'nameless'} file, expected .safetensors")
        return path.parent, _tensors_of(path)
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such file or directory")
    indexes = sorted(path.glob("*.safetensors.index.json"))
    if len(indexes) > 1:
        raise CheckpointError(f"{path}: found {' and '.join(i.name for i in indexes)}, expected one index")
    return path, _indexed(indexes[0]) if indexes else _scanned(path)


def _scanned(directory: Path) -> dict[str, StoredTensor]:
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{directory}: found no .safetensors file and no index, expected one or the other")
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for name, tensor in _tensors_of(file).items():
            if name in tensors:
                raise tensor.fault(f"it also in {tensors[name].file.name}", "it in one file of the directory")
            tensors[name] = tensor
    return tensors


def _indexed(index: Path) -> dict[str, StoredTensor]:
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index}: found no weight_map, expected an object of tensor names and files")
    # A target model's index lists hundreds of files; only those with a part of the head are opened.
    wanted = {name: index.parent / str(file) for name, file in weight_map.items() if _is_of_head(name)}
    stored = {file: _tensors_of(file) for file in sorted(set(wanted.values()))}
    for name, file in wanted.items():
        if name not in stored[file]:
            raise CheckpointError(f"{file}: tensor {name}: found nothing, expected it here according to {index.name}")
    return {name: stored[file][name] for name, file in wanted.items()}


def _is_of_head(name: str) -> bool:
    return any(pattern.fullmatch(name) for pattern in (_WEIGHT, _OTHER_PART)) or _is_map(name)


def _is_map(name: str) -> bool:
    return name.rpartition(".")[2] == "d2t"


def _tensors_of(file: Path) -> dict[str, StoredTensor]:
    with opened(file) as handle:
        slices = {name: handle.get_slice(name) for name in handle.keys() if _is_of_head(name)}  # noqa: SIM118
        return {n: StoredTensor(file, n, tuple(s.get_shape()), s.get_dtype()) for n, s in slices.items()}


def _pick(path: Path, tensors: dict[str, StoredTensor]) -> tuple[StoredTensor, StoredTensor, StoredTensor | None]:
    """W1, W2 and the map; every other tensor of the head is one that a walk can't honour."""
    found: dict[str, list[StoredTensor]] = {"W1": [], "W2": [], "d2t": []}
    for name, tensor in tensors.items():
        if match := _WEIGHT.fullmatch(name):
            found[_WHICH[match["which"]]].append(tensor)
        elif _is_map(name):
            found["d2t"].append(tensor)
        elif _QUANTISED.fullmatch(name):
            raise tensor.fault(f"{tensor.dtype} that scales or quantises the bias", "weights without scales")
        else:
            raise tensor.fault("a part of another head type", "only W1 and W2 of a vanilla head")
    for which, several in found.items():
        if len(several) > 1:
            names = ", ".join(sorted(tensor.name for tensor in several))
            raise CheckpointError(f"{path}: found several tensors for {which} ({names}), expected one")
    for which, name in (("W1", "markov_head.markov_w1.weight"), ("W2", "markov_head.markov_w2.weight")):
        if not found[which]:
            held = ", ".join(sorted(tensors)) or "no tensor of a Markov head"
            raise CheckpointError(f"{path}: tensor {name}: found {held}, expected {which} under this name or an alias")
    return found["W1"][0], found["W2"][0], found["d2t"][0] if found["d2t"] else None


@dataclass(frozen=True)
class _Config:
    """config.json, whose keys may be bare, `dspark_`-prefixed, or in a nested object."""

    file: Path
    values: dict[str, Any]

    @classmethod
    def beside(cls, directory: Path) -> _Config:
        file = directory / "config.json"
        return cls(file, _read_json(file) if file.is_file() else {})

    def _scopes(self) -> list[dict[str, Any]]:
        nested = [self.values.get(name) for name in _NESTED]
        return [scope for scope in (*nested, self.values) if isinstance(scope, dict)]

    def get(self, key: str) -> Any:
        for name in (f"dspark_{key}", key):
            for scope in self._scopes():
                if scope.get(name) is not None:
                    return scope[name]
        return None

    def integer(self, key: str) -> int | None:
        value = self.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise self._fault(key, repr(value), "a positive integer")
        return value

    def check_supported(self) -> None:
        kind = self.get("markov_head_type")
        if kind is not None and str(kind).lower() != "vanilla":
            raise self._fault("markov_head_type", repr(kind), "'vanilla', the head that a walk runs")
        for key, neutral in _BIAS_TRANSFORMS.items():
            value = self.get(key)
            if value not in neutral:
                raise self._fault(key, f"{value!r}, which transforms the bias", f"{neutral[1]!r} or no such key")

    def _fault(self, key: str, found: str, expected: str) -> CheckpointError:
        return CheckpointError(f"{self.file}: key {key}: found {found}, expected {expected}")


def _check_weights(w1: StoredTensor, w2: StoredTensor, config: _Config) -> None:
    target, draft, rank = (config.integer(key) for key in ("vocab_size", "draft_vocab_size", "markov_rank"))
    for weight in (w1, w2):
        if weight.dtype != _KEPT and weight.dtype not in _CONVERTED:
            raise weight.fault(weight.dtype, "BF16, or F16 or F32 to convert")
        if len(weight.shape) != 2 or 0 in weight.shape or weight.shape[1] != (rank or weight.shape[1]):
            raise weight.fault(f"shape {list(weight.shape)}", f"[vocabulary, {rank or 'markov_rank'}]")
    if w1.shape[0] < (target or 1):
        raise w1.fault(f"{w1.shape[0]} rows", f"{target} (vocab_size) or more")
    if w2.shape[0] != (draft or w2.shape[0]):
        raise w2.fault(f"{w2.shape[0]} rows", f"{draft} (draft_vocab_size)")
    if w2.shape[1] != w1.shape[1]:
        raise w2.fault(f"{w2.shape[1]} columns", f"{w1.shape[1]}, as {w1.name} has")


def _target_ids(d2t: StoredTensor | None, w1: StoredTensor, w2: StoredTensor, config: _Config) -> torch.Tensor | None:
    """The map as target ids. Checkpoints store target − draft."""
    if d2t is None:
        target = config.integer("vocab_size") or 1
        if not target <= w2.shape[0] <= w1.shape[0]:
            raise w2.fault(f"{w2.shape[0]} rows and no d2t", f"{target} to {w1.shape[0]} rows, or a d2t that maps them")
        return None
    if d2t.dtype not in _MAP_DTYPES or d2t.shape != (w2.shape[0],):
        raise d2t.fault(f"{d2t.dtype} {list(d2t.shape)}", f"I64 [{w2.shape[0]}], one entry for each row of {w2.name}")
    ids = d2t.rows(0, w2.shape[0]).long() + torch.arange(w2.shape[0])
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= w1.shape[0]:
        raise d2t.fault(f"target ids from {low} to {high}", f"[0, {w1.shape[0]}), the rows of {w1.name}")
    return ids
