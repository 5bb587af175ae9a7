"""The notes of all ranks of a case, held against the failure contract and against what the case expects."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

from fault_cases import Case
from fault_ranks import Run
from fault_scene import STAND_IN, VICTIM, Note

# How much later than its deadline a survivor may report: looks at the clock, the host's part, the way to another GPU.
GRACE_S = 2.0


@dataclass(frozen=True)
class Verdict:
    """outcome: in a word or two. report_s: from the fault (where nobody told of it, from the part's beginning) to the
    last survivor's report. wrong: what breaks the contract, "" if nothing does. message: a survivor's first error.
    """

    outcome: str
    report_s: float | None
    wrong: str
    message: str


def judge(case: Case, run: Run) -> Verdict:
    """Holds a run against the contract and the case's expectation."""
    if run.hung:
        return Verdict("hung", None, f"ranks {run.hung} gave no answer", "")
    lives = {rank: notes for rank, notes in enumerate(run.results) if notes is not None}
    broken = _wrong_tokens(lives, case.expected.next_block) or _not_recovered(lives)
    if broken:
        return Verdict("wrong", None, broken, "")
    told: list[float] = []
    messages: list[str] = []
    for rank, notes in lives.items():
        if rank == VICTIM and case.expected.kinds and not case.expected.victims_too:
            continue
        first = next((note for note in notes if note.kind is not None), None)
        if first is None:
            if case.expected.kinds and not case.expected.may_pass:
                return Verdict("silent", None, f"rank {rank} reported nothing", "")
            continue
        if first.kind not in case.expected.kinds:
            return Verdict("another error", None, f"rank {rank} raised {first.kind} in {first.part}: {first.error}", "")
        if not re.search(case.expected.says, first.error):
            return Verdict("unclear", None, f"rank {rank} doesn't say {case.expected.says!r}: {first.error}", "")
        told.append(first.ended - (run.faulted_at or first.began))
        messages.append(first.error)
    if not told:
        return Verdict("no error", None, "", "")
    report_s, limit_s = max(told), case.expected.deadline_s + GRACE_S
    late = f"reported after {report_s:.1f} s; the limit is {limit_s:.1f} s" if report_s > limit_s else ""
    return Verdict("late" if late else "reported", report_s, late, messages[0])


def _wrong_tokens(lives: dict[int, list[Note]], next_block: bool) -> str:
    """A failed block must hold the anchors, any other what the definition says (and so the same on every rank)."""
    for rank, notes in lives.items():
        blocks = [note for note in notes if note.tokens is not None]
        for block, following in itertools.zip_longest(blocks, blocks[1:]):
            if block.kind is not None and not block.anchored:
                return f"rank {rank}: the tokens of {block.part}, which failed, aren't the anchors: {block.tokens}"
            found_out = next_block and following is not None and following.kind is not None
            if block.kind is None and not block.right and not found_out:
                return f"rank {rank}: {block.part} is wrong, and no error: {block.tokens}"
    return ""


def _not_recovered(lives: dict[int, list[Note]]) -> str:
    """The plan that stands in serves, and after a reset, in which all take part, everything goes well."""
    for rank, notes in lives.items():
        parts = [note.part for note in notes]
        for note in notes:
            if note.part == STAND_IN and note.kind is not None:
                return f"rank {rank}: nothing stands in: {note.kind}: {note.error}"
        for note in notes[parts.index("reset") :] if "reset" in parts else ():
            if note.kind is not None:
                return f"rank {rank}: {note.kind} in {note.part} after the reset: {note.error}"
    return ""
