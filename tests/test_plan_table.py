"""The measured table: its file, what makes it unusable, and what it says between and beyond the measured sizes."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tp_walk import plan_table
from tp_walk.plan_table import (
    SCHEMA,
    Machine,
    PlanTable,
    Row,
    Sample,
    find_table,
    joint_provenance,
    load,
    shipped_tables,
    user_path,
)

MACHINE = Machine("NVIDIA H200", 2, "NVLink", 151_936, 256)


def row(batch: int, gamma: int = 7, **us: float) -> Row:
    return Row("sharded", "greedy", gamma, batch, {name: Sample(t, 0.5, t + 9) for name, t in us.items()}, {}, {})


def table(*rows: Row, **provenance: str | None) -> PlanTable:
    return PlanTable(MACHINE, {"driver": "580", "date": "2026-11-29"} | provenance, rows)


# int8 is ahead at 8, tp_bf16 at 16, and they cross at 12: half-way, where both take 45.
CROSSING = table(row(8, tp_bf16=44.0, int8=40.0), row(16, tp_bf16=46.0, int8=50.0))


@pytest.fixture(autouse=True)
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TP_WALK_DATA_DIR", str(tmp_path))
    monkeypatch.setattr(plan_table, "_warned", set())
    return tmp_path


def estimate(which: PlanTable, batch: int, gamma: int = 7, plans: tuple[str, ...] = ("tp_bf16", "int8")) -> Any:
    return which.estimate("sharded", "greedy", gamma, batch, plans)


class TestEstimates:
    def test_a_measured_size_is_as_measured(self) -> None:
        assert estimate(CROSSING, 8).us == {"tp_bf16": 44.0, "int8": 40.0}
        assert estimate(CROSSING, 8).how == ""

    def test_between_batches_each_plans_time_is_interpolated(self) -> None:
        assert estimate(CROSSING, 10).us == {"tp_bf16": 44.5, "int8": 42.5}
        assert estimate(CROSSING, 14).us == {"tp_bf16": 45.5, "int8": 47.5}
        assert estimate(CROSSING, 10).how == "interpolated between batch 8 and 16"

    @pytest.mark.parametrize(("batch", "nearest"), [(1, 8), (64, 16)])
    def test_beyond_the_measured_batches_the_nearest_counts(self, batch: int, nearest: int) -> None:
        found = estimate(CROSSING, batch)
        assert found.us == estimate(CROSSING, nearest).us
        assert found.how == f"nearest measured batch {nearest}"

    def test_between_gammas_too(self) -> None:
        two = table(
            row(1, 6, tp_bf16=30.0), row(3, 6, tp_bf16=34.0), row(1, 16, tp_bf16=60.0), row(3, 16, tp_bf16=68.0)
        )
        found = estimate(two, 2, gamma=11)
        assert found.us == {"tp_bf16": (32.0 + 64.0) / 2}
        assert found.how == "interpolated between batch 1 and 3, interpolated between gamma 6 and 16"
        assert estimate(two, 1, gamma=20).how == "nearest measured gamma 16"

    def test_a_plan_that_is_missing_at_a_neighbour_is_not_guessed(self) -> None:
        holed = table(row(8, tp_bf16=44.0, int8=40.0), row(16, tp_bf16=46.0))
        assert estimate(holed, 12).us == {"tp_bf16": 45.0}
        assert estimate(holed, 8).us == {"tp_bf16": 44.0, "int8": 40.0}

    def test_rows_without_any_of_the_plans_are_as_if_not_measured(self) -> None:
        holed = table(row(8, int8=40.0), row(12, tp_bf16=1.0), row(16, int8=50.0))
        assert estimate(holed, 12, plans=("int8",)).us == {"int8": 45.0}
        assert estimate(holed, 12, plans=("certified",)) is None

    def test_layouts_and_modes_stand_for_themselves(self) -> None:
        assert CROSSING.estimate("full", "greedy", 7, 8, ["int8"]) is None
        assert CROSSING.estimate("sharded", "sampled", 7, 8, ["int8"]) is None


def test_what_is_made_from_several_tables_names_all_versions() -> None:
    tables = [table(date="today", source="a", text=None), table(date="today", source="b", text="prose")]
    assert joint_provenance(tables) == {"driver": "580", "date": "today", "source": "a, b", "text": "prose"}
    assert joint_provenance([]) == {}


class TestFiles:
    def test_a_table_survives_its_file(self, tmp_path: Path) -> None:
        path = tmp_path / "deep" / "table.json"
        refused = replace(
            CROSSING.rows[0], baseline={"torch": Sample(200.0, 1.0, 230.0)}, refused={"certified": "“no”"}
        )
        full = table(refused, CROSSING.rows[1])
        full.write(path)
        assert PlanTable.read(path) == replace(full, rows=list(full.rows))
        assert full.digest() == PlanTable.read(path).digest()
        assert [file.name for file in path.parent.iterdir()] == ["table.json"]

    def test_every_word_of_it_counts_in_the_digest(self) -> None:
        others = [
            table(*CROSSING.rows, driver="581"),
            replace(CROSSING, machine=replace(MACHINE, link="PCIe")),
            table(row(8, tp_bf16=44.0, int8=40.1), CROSSING.rows[1]),
        ]
        assert len({other.digest() for other in [CROSSING, *others]}) == 4

    def test_no_file_is_no_matter(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        assert load(tmp_path / "none.json", MACHINE) is None
        assert caplog.text == ""

    @pytest.mark.parametrize("damage", ["cut", "empty", "list", "schema", "type", "zero", "layout", "folder", "field"])
    def test_what_cannot_be_used_is_ignored_with_one_warning(
        self, damage: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        path = user_path(MACHINE)
        CROSSING.write(path)
        content = json.loads(path.read_text())
        if damage == "cut":
            path.write_text(path.read_text()[:-20])
        elif damage == "empty":
            path.write_text("")
        elif damage == "folder":
            path.unlink()
            path.mkdir()
        else:
            if damage == "list":
                content = [content]
            elif damage == "schema":
                content["schema"] = SCHEMA + 1
            elif damage == "type":
                content["rows"][0]["plans"]["int8"]["us"] = "fast"
            elif damage == "zero":
                content["rows"][0]["plans"]["int8"]["us"] = 0.0
            elif damage == "layout":
                content["rows"][0]["layout"] = "diagonal"
            elif damage == "field":
                del content["match"]["link"]
            path.write_text(json.dumps(content))
        with caplog.at_level(logging.WARNING):
            assert load(path, MACHINE) is None
            assert load(path, MACHINE) is None
        (record,) = caplog.records
        assert str(path) in record.getMessage()
        assert "tp-walk crossover --nproc 2 --vocab 151936 --rank 256" in record.getMessage()

    @pytest.mark.parametrize(
        "other",
        [
            replace(MACHINE, gpu="NVIDIA H100"),
            replace(MACHINE, world_size=4),
            replace(MACHINE, link="PCIe"),
            replace(MACHINE, vocab_size=129_280),
            replace(MACHINE, markov_rank=512),
        ],
    )
    def test_a_table_of_another_machine_is_ignored_with_one_warning(
        self, other: Machine, caplog: pytest.LogCaptureFixture
    ) -> None:
        path = user_path(MACHINE)
        replace(CROSSING, machine=other).write(path)
        assert load(path, MACHINE) is None
        assert load(path, MACHINE) is None
        (record,) = caplog.records
        assert f"measured on {other}; this is {MACHINE}" in record.getMessage()
        assert other.file_name != MACHINE.file_name

    def test_the_users_own_table_goes_before_the_shipped_one(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(plan_table, "SHIPPED_DIR", tmp_path / "shipped")
        assert find_table(MACHINE) is None
        table(*CROSSING.rows, date="shipped").write(tmp_path / "shipped" / MACHINE.file_name)
        assert find_table(MACHINE).provenance["date"] == "shipped"
        table(*CROSSING.rows, date="own").write(user_path(MACHINE))
        assert find_table(MACHINE).provenance["date"] == "own"
        user_path(MACHINE).write_text("{")
        assert find_table(MACHINE).provenance["date"] == "shipped"

    def test_a_new_measurement_keeps_what_it_did_not_repeat(self) -> None:
        newer = table(row(16, tp_bf16=1.0), date="2027-01-01")
        merged = newer.merged_over(CROSSING)
        assert [(one.batch, one.plans["tp_bf16"].us) for one in merged.rows] == [(8, 44.0), (16, 1.0)]
        assert merged.provenance["date"] == "2027-01-01"

    def test_rows_of_other_software_are_not_kept(self) -> None:
        newer = table(row(16, tp_bf16=1.0), driver="590")
        assert newer.merged_over(CROSSING) is newer
        assert newer.merged_over(None) is newer

    def test_the_shipped_tables_are_tables_of_what_they_are_named_after(self) -> None:
        for shipped in shipped_tables():
            assert load(plan_table.SHIPPED_DIR / shipped.machine.file_name, shipped.machine) == shipped
            assert {one.mode for one in shipped.rows} == {"greedy", "sampled"}
