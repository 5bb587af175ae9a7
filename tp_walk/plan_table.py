"""The measured table: time of each plan by batch size, on one kind of machine, for one shape of head.

A JSON file in the user's data directory, named after what must match; tables for known machines come with the package.
A file that can't be used is never an error: it is ignored, with one warning that says how to measure again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from tp_walk.config import settings
from tp_walk.errors import WalkInputError
from tp_walk.files import write_whole
from tp_walk.jit import source_hash
from tp_walk.results import environment

logger = logging.getLogger(__name__)

SCHEMA = 1

Layout = Literal["sharded", "full"]
Mode = Literal["greedy", "sampled"]
LAYOUTS: tuple[Layout, ...] = ("sharded", "full")
MODES: tuple[Mode, ...] = ("greedy", "sampled")

SHIPPED_DIR = Path(__file__).with_name("crossover_tables")

_warned: set[Path] = set()


@dataclass(frozen=True)
class Machine:
    """What a table must match, besides layout and mode, which its rows name.

    gpu: the model, as the driver names it. link: "NVLink", "PCIe" or "unknown", the worst between two of the ranks;
    "none" in a world of one. vocab_size, markov_rank: V and r of the head.
    """

    gpu: str
    world_size: int
    link: str
    vocab_size: int
    markov_rank: int

    def __str__(self) -> str:
        over = f", {self.link}" if self.world_size > 1 else ""
        return f"{self.world_size}× {self.gpu}{over}, V = {self.vocab_size:,}, r = {self.markov_rank}"

    @property
    def file_name(self) -> str:
        gpu = re.sub(r"[^a-z0-9]+", "-", self.gpu.lower()).strip("-")
        link = f"-{self.link.lower()}" if self.world_size > 1 else ""
        return f"{gpu}-x{self.world_size}{link}-v{self.vocab_size}-r{self.markov_rank}.json"

    @property
    def measuring_command(self) -> str:
        return f"tp-walk crossover --nproc {self.world_size} --vocab {self.vocab_size} --rank {self.markov_rank}"


@dataclass(frozen=True)
class Sample:
    """µs of one block: median (of plan certified the mean: it depends on the text), the quartiles' distance, p99. See
    `timing.Timing`."""

    us: float
    spread_us: float
    p99_us: float


@dataclass(frozen=True)
class Row:
    """One measured point.

    plans: plan → time. baseline: torch walk → time. refused: plan → why it wasn't timed.
    """

    layout: Layout
    mode: Mode
    gamma: int
    batch: int
    plans: Mapping[str, Sample]
    baseline: Mapping[str, Sample]
    refused: Mapping[str, str]

    @property
    def place(self) -> tuple[Layout, Mode, int, int]:
        return self.layout, self.mode, self.gamma, self.batch


@dataclass(frozen=True)
class Estimate:
    """What a table says of one size. us: plan → µs of a block. how: "" for a measured size, else where it is from."""

    us: Mapping[str, float]
    how: str


@dataclass(frozen=True)
class PlanTable:
    """provenance: `software()` and "date" of the measurement, and the "text" that plan certified was timed on, if any;
    they needn't match to use the table."""

    machine: Machine
    provenance: Mapping[str, str | None]
    rows: Sequence[Row]

    def estimate(self, layout: Layout, mode: Mode, gamma: int, batch: int, plans: Collection[str]) -> Estimate | None:
        """The time of each of `plans`, or None when the table has none of them for this layout and mode.

        Between measured sizes a plan's time is interpolated, linearly in batch and in gamma; the choice is then made
        from the times. Beyond the measured sizes the nearest counts.
        """
        by_gamma: dict[int, dict[int, Row]] = {}
        for row in self.rows:
            if row.layout == layout and row.mode == mode and any(plan in row.plans for plan in plans):
                by_gamma.setdefault(row.gamma, {})[row.batch] = row
        if not by_gamma:
            return None
        corners: list[tuple[float, Row]] = []
        notes = []
        for gamma_weight, near_gamma in _neighbours(gamma, sorted(by_gamma)):
            at_gamma = by_gamma[near_gamma]
            near = _neighbours(batch, sorted(at_gamma))
            corners += [(gamma_weight * weight, at_gamma[near_batch]) for weight, near_batch in near]
        for name, value in (("batch", batch), ("gamma", gamma)):
            used = sorted({int(getattr(row, name)) for _, row in corners})
            if len(used) > 1:
                notes.append(f"interpolated between {name} {used[0]} and {used[-1]}")
            elif used != [value]:
                notes.append(f"nearest measured {name} {used[0]}")
        us = {
            plan: sum(weight * row.plans[plan].us for weight, row in corners)
            for plan in plans
            if all(plan in row.plans for _, row in corners)
        }
        return Estimate(us, ", ".join(notes)) if us else None

    def merged_over(self, older: PlanTable | None) -> PlanTable:
        """This table, with the rows of an older one that it doesn't have, if that was measured on the same software."""
        if older is None or older.machine != self.machine or _software(older) != _software(self):
            return self
        places = {row.place for row in self.rows}
        kept = [row for row in older.rows if row.place not in places]
        rows = sorted([*kept, *self.rows], key=lambda row: row.place)
        return PlanTable(self.machine, self.provenance, rows)

    def digest(self) -> str:
        """A hash of all that the table says."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]

    def write(self, path: Path) -> None:
        """Writes the JSON whole, a row a line; raises OSError."""
        head = {"schema": SCHEMA, "match": asdict(self.machine), "provenance": dict(self.provenance)}
        lines = [f" {json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}," for name, value in head.items()]
        rows = ",\n".join(f"  {json.dumps(asdict(row), ensure_ascii=False)}" for row in self.rows)
        write_whole(path, "\n".join(["{", *lines, ' "rows": [', rows, " ]", "}", ""]).encode())

    @classmethod
    def read(cls, path: Path) -> PlanTable:
        """Reads what `write` wrote.

        Raises:
            WalkInputError: the file is of another schema, or no table. OSError: it can't be read.
        """
        try:
            content = json.loads(path.read_text())
            if not isinstance(content, dict) or "schema" not in content:
                raise ValueError("no crossover table")
            if content["schema"] != SCHEMA:
                raise ValueError(f"its schema is {content['schema']!r}, this version reads {SCHEMA}")
            return cls(
                Machine(**_typed(content["match"], Machine)),
                {str(name): None if value is None else str(value) for name, value in content["provenance"].items()},
                [_row(row) for row in content["rows"]],
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise WalkInputError(f"{path} can't be used as a crossover table: {error!r}") from error


def user_path(machine: Machine) -> Path:
    """Where `tp-walk crossover` keeps the table of this machine."""
    return settings().data_dir / "crossover" / machine.file_name


def find_table(machine: Machine) -> PlanTable | None:
    """The user's own table of this machine, else the one that comes with the package, else None."""
    for path in (user_path(machine), SHIPPED_DIR / machine.file_name):
        table = load(path, machine)
        if table is not None:
            return table
    return None


def load(path: Path, machine: Machine) -> PlanTable | None:
    """The table in a file if it is one of this machine; else None, with one warning unless there is no file."""
    try:
        table = PlanTable.read(path)
        if table.machine != machine:
            raise WalkInputError(f"{path} was measured on {table.machine}; this is {machine}")
    except FileNotFoundError:
        return None
    except (OSError, WalkInputError) as error:
        if path not in _warned:
            _warned.add(path)
            logger.warning("%s; it is ignored. Measure again with: %s", error, machine.measuring_command)
        return None
    return table


def shipped_tables() -> list[PlanTable]:
    """All tables that come with the package."""
    return [PlanTable.read(path) for path in sorted(SHIPPED_DIR.glob("*.json"))]


def known_tables() -> list[PlanTable]:
    """The user's own tables, of whatever machines, then the shipped ones."""
    own = []
    for path in sorted((settings().data_dir / "crossover").glob("*.json")):
        try:
            own.append(PlanTable.read(path))
        except (OSError, WalkInputError) as error:
            logger.warning("%s; it is ignored", error)
    return own + shipped_tables()


def software() -> dict[str, str | None]:
    """What a table records of the software that it was measured on: driver, CUDA, torch and the kernels' source."""
    here = environment()
    recorded = {name: here[name] for name in ("driver", "CUDA", "torch")}
    return {name: None if value is None else str(value) for name, value in recorded.items()} | {"source": source_hash()}


def _neighbours(value: int, measured: Sequence[int]) -> list[tuple[float, int]]:
    """(weight, measured value) of the one or two measured values that stand for `value`; `measured` is sorted."""
    at = bisect_left(measured, value)
    if at == len(measured):
        return [(1.0, measured[-1])]
    if at == 0 or measured[at] == value:
        return [(1.0, measured[at])]
    below, above = measured[at - 1], measured[at]
    share = (value - below) / (above - below)
    return [(1.0 - share, below), (share, above)]


def joint_provenance(tables: Iterable[PlanTable]) -> dict[str, str]:
    """Of what is made from several tables: each entry with all the values that it has in them."""
    values: dict[str, set[str]] = {}
    for table in tables:
        for name, value in table.provenance.items():
            values.setdefault(name, set()).update([value] if value else [])
    return {name: ", ".join(sorted(those)) for name, those in values.items()}


def _software(table: PlanTable) -> dict[str, str | None]:
    return {name: value for name, value in table.provenance.items() if name != "date"}


def _typed(fields: Mapping[str, Any], cls: type) -> Mapping[str, Any]:
    """The fields, if each has the type that the class names; a wrong one would only be found when it is used."""
    types: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,)}
    for name, annotation in cls.__annotations__.items():
        if annotation in types and (not isinstance(fields[name], types[annotation]) or isinstance(fields[name], bool)):
            raise ValueError(f"{name} is {fields[name]!r}")
    return fields


def _row(fields: Mapping[str, Any]) -> Row:
    times = {
        kind: {name: Sample(**_typed(sample, Sample)) for name, sample in fields[kind].items()}
        for kind in ("plans", "baseline")
    }
    row = Row(**{**_typed(fields, Row), **times})
    if row.layout not in LAYOUTS or row.mode not in MODES or row.gamma < 1 or row.batch < 1:
        raise ValueError(f"a row at {row.place}")
    if any(not 0.0 < sample.us < float("inf") for kind in times.values() for sample in kind.values()):
        raise ValueError(f"a time at {row.place} that isn't positive")
    return row
