"""What goes wrong in a case of the fault matrix: every rank lives a scenario, and rank VICTIM differs at one point."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeVar
from unittest import mock

from fault_ranks import Life
from fault_scene import Note, Scene, Setting, at_exchange, at_stage

from tp_walk import pair_test
from tp_walk.group import WalkGroup

T = TypeVar("T")


@dataclass(frozen=True)
class Expected:
    """What survivors must report: an error of one of the classes whose message matches, within deadline_s.

    With no classes, nobody may report anything. victims_too: the victim must report the same. may_pass: it may also go
    well. next_block: wrong tokens of a block's end may come to light with the next block.
    """

    kinds: tuple[str, ...] = ()
    says: str = ""
    deadline_s: float = 0.0
    victims_too: bool = False
    may_pass: bool = False
    next_block: bool = False


Scenario = Callable[["Scene", dict[str, Any]], None]


@dataclass(frozen=True)
class Case:
    """A row of the matrix. scenario: a module's function; arguments: its own."""

    fault: str
    phase: str
    setting: Setting
    scenario: Scenario
    expected: Expected
    arguments: dict[str, Any] = field(default_factory=dict)


def live(life: Life, case: Case) -> list[Note]:
    """A rank's part of a case."""
    scene = Scene(life, case.setting)
    case.scenario(scene, case.arguments)
    return scene.notes


def stages_of_set_up(scene: Scene, arguments: dict[str, Any]) -> None:
    """Nothing goes wrong; notes the stages that set-up passes."""
    stage, names = WalkGroup.stage, list[str]()

    def noted(self: WalkGroup, name: str, action: Callable[[], T]) -> T:
        names.append(name)
        return stage(self, name, action)

    with mock.patch.object(WalkGroup, "stage", noted), untested_links():
        scene.open()
    scene.close()
    now = time.monotonic()
    scene.notes = [Note(name, None, "", now, now) for name in names]


def untested_links() -> AbstractContextManager[object]:
    """Set-up with the self-test of each pair of GPUs, whether it has passed before or not."""
    return mock.patch.object(pair_test, "_read_cached", return_value=None)


def lost_in_set_up(scene: Scene, arguments: dict[str, Any]) -> None:
    """stage, action: where the victim does what. Then everybody tries again without it, if it still lives."""

    def act() -> None:
        scene.act(arguments["action"])

    with untested_links():
        if scene.is_victim:
            with at_stage(arguments["stage"], act):
                scene.open()
        else:
            scene.open()
    if arguments["action"] == "raises":
        scene.open()
        scene.block()
    scene.close()


def lost_between_blocks(scene: Scene, arguments: dict[str, Any]) -> None:
    """action: what the victim does before its second block."""
    scene.open_with_standby()
    scene.block()
    if scene.is_victim:
        scene.act(arguments["action"])
    scene.block()
    scene.block()
    scene.recover(arguments["action"])
    scene.close()


def lost_in_a_step(scene: Scene, arguments: dict[str, Any]) -> None:
    """step, action: where in its second block the victim, on the CPU, does what."""
    scene.open()
    scene.block()
    if scene.is_victim:
        with at_exchange(arguments["step"], lambda: scene.act(arguments["action"])):
            scene.block()
    else:
        scene.block()
    scene.block()
    scene.close()


def lost_at_the_end(scene: Scene, arguments: dict[str, Any]) -> None:
    """action: what the victim does instead of closing."""
    scene.open()
    scene.block()
    if scene.is_victim:
        scene.act(arguments["action"])
    scene.close()


def given_something_else(scene: Scene, arguments: dict[str, Any]) -> None:
    """different: arguments of the victim's second block. alike: of everybody's. plans: those held. After a reset all is
    well.
    """
    scene.open(plans=arguments.get("plans", [scene.setting.plan]))
    scene.block()
    alike = arguments.get("alike", {})
    scene.block(**alike | (arguments["different"] if scene.is_victim else {}))
    scene.reset()
    scene.block()
    scene.close()


def opened_otherwise(scene: Scene, arguments: dict[str, Any]) -> None:
    """different: arguments of the victim's runtime."""
    scene.open(**arguments["different"] if scene.is_victim else {})
    scene.close()


def one_block_fewer(scene: Scene, arguments: dict[str, Any]) -> None:
    scene.open()
    scene.block()
    if scene.is_victim:
        scene.blocks += 1  # skipped; the next is the others' third
    else:
        scene.block()
    scene.block(anchor=9)
    scene.recover(None)
    scene.close()


def one_block_more(scene: Scene, arguments: dict[str, Any]) -> None:
    scene.open()
    scene.block()
    if scene.is_victim:
        scene.block()
    else:
        scene.blocks += 1
        time.sleep(arguments["late_s"])
    scene.block(anchor=9)
    scene.recover(None)
    scene.close()


def slow_to_start(scene: Scene, arguments: dict[str, Any]) -> None:
    """skew_s: how much later the victim walks its first block. That must not fail."""
    scene.open()
    if scene.is_victim:
        time.sleep(arguments["skew_s"])
    for _ in range(3):
        scene.block()
    scene.close()
