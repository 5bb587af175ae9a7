"""What a measurement leaves behind: one JSON file in experiments/results, one table in the README.

Every experiment writes a `ResultTable`. The rows may hold more than the columns show; the columns say what is printed.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tp_walk.errors import PlanUnavailableError, WalkInputError
from tp_walk.files import write_whole

Cell = str | int | float | bool | None


@dataclass(frozen=True)
class Column:
    """A printed column: the rows' `key`, under `title`; floats with `digits` decimals."""

    key: str
    title: str
    digits: int = 1


@dataclass(frozen=True)
class ResultTable:
    """A measured table.

    title: what was measured, with its unit. method: how, in a sentence or two. environment: of `environment()`, on the
    machine that measured. rows: each a mapping of keys, of which `columns` prints some.
    """

    title: str
    method: str
    environment: Mapping[str, Cell]
    columns: Sequence[Column]
    rows: Sequence[Mapping[str, Any]]

    def cells(self) -> list[list[str]]:
        """The printed cells, `[rows][columns]`; a value that a row lacks is a dash."""
        return [[_format(row.get(column.key), column.digits) for column in self.columns] for row in self.rows]

    def to_markdown(self) -> str:
        """Title, table, then the machine and the method in one line."""
        lines = [[column.title for column in self.columns], ["---"] * len(self.columns), *self.cells()]
        table = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
        machine = ", ".join(f"{name} {value}" for name, value in self.environment.items() if value is not None)
        return f"**{self.title}**\n\n{table}\n\n<sub>{machine}. {self.method}</sub>"

    def write(self, path: Path) -> None:
        """Writes the JSON; a reader never sees half of it."""
        write_whole(path, (json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n").encode())

    @classmethod
    def read(cls, path: Path) -> ResultTable:
        """Reads what `write` wrote.

        Raises:
            WalkInputError: the file holds something else; the message says what.
        """
        try:
            fields = json.loads(path.read_text())
            columns = [Column(**column) for column in fields.pop("columns")]
            table = cls(columns=columns, **fields)
            table.cells()
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise WalkInputError(f"{path} holds no table of results: {error!r}; measure it again") from error
        return table


def environment() -> dict[str, Cell]:
    """What a figure depends on besides the code: GPUs, driver, CUDA, NVRTC, torch, Python; None where there is none."""
    import torch

    from tp_walk.jit import nvrtc_version

    gpus = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )
    try:
        nvrtc = ".".join(map(str, nvrtc_version()))
    except PlanUnavailableError:
        nvrtc = None
    return {
        "GPU": ", ".join(f"{gpus.count(name)}× {name}" for name in dict.fromkeys(gpus)) or None,
        "CPU": None if gpus else f"{platform.machine()}, {os.cpu_count()} cores",
        "driver": _driver_version(),
        "CUDA": torch.version.cuda,
        "NVRTC": nvrtc,
        "torch": torch.__version__,
        "Python": platform.python_version(),
    }


def _driver_version() -> str | None:
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no pynvml, or no driver: nvml's error classes exist only with the module
        return None
    try:
        return str(pynvml.nvmlSystemGetDriverVersion())
    finally:
        pynvml.nvmlShutdown()


def _format(value: Any, digits: int) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.{digits}f}"
    return str(value)
