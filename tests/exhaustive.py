"""The search behind the protocol models: every state that any order of steps can lead to. No model lives here."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import TypeVar

State = TypeVar("State", bound=Hashable)


class ProtocolError(Exception):
    """A protocol that loses or mistakes a word, or in which everybody waits."""


def visit(start: State, successors: Callable[[State], Iterator[State]], ended: Callable[[State], bool]) -> int:
    """Visits every reachable state and returns how many there are.

    Raises:
        ProtocolError: a state without a successor in which not everybody has `ended`; or as `successors` does.
    """
    visited, frontier = {start}, [start]
    while frontier:
        state = frontier.pop()
        stuck = True
        for after in successors(state):
            stuck = False
            if after not in visited:
                visited.add(after)
                frontier.append(after)
        if stuck and not ended(state):
            raise ProtocolError(f"deadlock: everybody waits at {state}")
    return len(visited)
