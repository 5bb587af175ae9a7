"""The measured table that comes with the package: who finds it, what is chosen from it, and how near the seed comes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import tp_walk
from tp_walk import crossover_cli, plan_table
from tp_walk.config import WalkShape
from tp_walk.cost_model import seed_us
from tp_walk.plan import EXECUTORS
from tp_walk.plan_table import LAYOUTS, Machine, PlanTable, find_table, shipped_tables
from tp_walk.selection import Selector

H200S = Machine("NVIDIA H200", 2, "NVLink", 151_936, 256)
REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def no_table_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TP_WALK_DATA_DIR", str(tmp_path))
    monkeypatch.setattr(plan_table, "_warned", set())


@pytest.fixture
def measured() -> PlanTable:
    table = find_table(H200S)
    assert table is not None
    return table


def test_it_has_every_layout_and_mode_at_the_ends(measured: PlanTable) -> None:
    assert measured in shipped_tables()
    sizes = {row.place for row in measured.rows}
    assert len(sizes) == len(measured.rows)
    for layout in LAYOUTS:
        assert {
            (layout, mode, gamma, batch) for mode in ("greedy", "sampled") for gamma in (7, 16) for batch in (1, 64)
        } <= sizes


def test_a_runtime_of_such_gpus_selects_by_it(two_h200s: None, measured: PlanTable) -> None:
    plan = tp_walk.auto_select(8, gamma=7, sampled=False, shape=WalkShape(151_936, 256, 2))
    (row,) = (row for row in measured.rows if row.place == ("sharded", "greedy", 7, 8))
    assert (plan.name, plan.expected_us) == ("tp_bf16", row.plans["tp_bf16"].us)
    assert plan.provenance.startswith(f"measured {measured.provenance['date']} on {H200S}")
    assert "since then: driver 580.159.04 → 590" in plan.provenance


def test_other_vocabularies_are_still_seeded(two_h200s: None) -> None:
    for vocab_size in (129_280, 248_320):
        plan = tp_walk.auto_select(8, gamma=7, sampled=False, shape=WalkShape(vocab_size, 256, 2))
        assert plan.provenance.startswith("seed")
        assert f"--vocab {vocab_size}" in plan.provenance


def test_the_fastest_is_taken_at_every_measured_size_and_never_what_has_no_time(measured: PlanTable) -> None:
    """`certified` can run, but wasn't there to be measured."""
    selector = Selector(H200S, measured, EXECUTORS)
    assert not any("certified" in row.plans for row in measured.rows)
    for row in measured.rows:
        plan = selector(row.batch, row.gamma, row.mode == "sampled", row.layout)
        assert plan.expected_us == min(sample.us for sample in row.plans.values())
    for batch in range(1, 65):
        for layout in LAYOUTS:
            assert selector(batch, 9, True, layout).name != "certified"


def test_a_laptop_answers_from_it(measured: PlanTable) -> None:
    arguments = ["--gpu", "H200", "--nproc", "2", "--batch", "8"]
    here = CliRunner().invoke(crossover_cli.plan, arguments)
    assert here.exit_code == 0
    assert here.output.startswith("batch 8: tp_bf16, ")
    assert here.output.endswith(f"(measured {measured.provenance['date']} on {H200S})\n")
    other = CliRunner().invoke(crossover_cli.plan, [*arguments, "--vocab", "129280"])
    assert "(seed, from the hardware's limits; measure with: tp-walk crossover --nproc 2 --vocab 129280" in other.output


class TestTheSeed:
    """The model's constants were fitted to this table: these say that it is of the right form, and stays so."""

    def test_its_choice_costs_little(self, measured: PlanTable) -> None:
        regrets = []
        for row in measured.rows:
            plan = Selector(H200S, None, row.plans)(row.batch, row.gamma, row.mode == "sampled", row.layout)
            assert plan.provenance.startswith("seed")
            regrets.append(row.plans[plan.name].us / min(sample.us for sample in row.plans.values()))
        assert sum(regrets) / len(regrets) < 1.01
        assert max(regrets) < 1.1

    def test_it_meets_every_measured_time(self, measured: PlanTable) -> None:
        for row in measured.rows:
            for plan, sample in row.plans.items():
                seed = seed_us(
                    plan,
                    vocab_size=151_936,
                    markov_rank=256,
                    world_size=2,
                    batch=row.batch,
                    gamma=row.gamma,
                    sampled=row.mode == "sampled",
                    layout=row.layout,
                )
                assert seed == pytest.approx(sample.us, rel=0.2), (plan, row.place)

    def test_it_meets_the_times_of_one_gpu(self) -> None:
        """Measured with the bench; of these only the streaming rate was fitted."""
        bench = json.loads((REPOSITORY / "experiments" / "results" / "bench.json").read_text())
        times = [
            (plan, row, row[f"{plan}_1gpu_us"])
            for row in bench["rows"]
            for plan in ("tp_bf16", "int8")
            if row.get(f"{plan}_1gpu_us")
        ]
        assert times
        for plan, row, us in times:
            shape = {"vocab_size": row["vocab_size"], "markov_rank": 256, "world_size": 1, "layout": "full"}
            size = {"batch": row["batch"], "gamma": row["gamma"], "sampled": row["mode"] != "greedy"}
            assert seed_us(plan, **shape, **size) == pytest.approx(us, rel=0.2), (plan, size)
