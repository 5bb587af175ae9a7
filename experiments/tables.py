"""Writes the README's measured tables from experiments/results; `--check` only says whether they are up to date.

A table stands between `<!-- table: NAME.json -->` and `<!-- end of table -->`, and nothing there is written by hand.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from tp_walk.results import ResultTable

REPOSITORY = Path(__file__).resolve().parents[1]
README = REPOSITORY / "README.md"
RESULTS = REPOSITORY / "experiments" / "results"

_END = "<!-- end of table -->"
_TABLE = re.compile(rf"(<!-- table: (?P<name>[\w.-]+\.json) -->\n)(?P<body>.*?)({_END})", re.DOTALL)


def with_tables(text: str, results: Path = RESULTS) -> str:
    """The text with every table made anew; one that wasn't measured yet says so.

    Raises:
        ValueError: a marker has no end, or an end no marker.
        tp_walk.errors.WalkInputError: a results file holds no table.
    """
    if text.count("<!-- table:") != text.count(_END) or len(_TABLE.findall(text)) != text.count(_END):
        raise ValueError(f"each <!-- table: NAME.json --> needs its own {_END}")

    def fill(match: re.Match[str]) -> str:
        path = results / match["name"]
        body = ResultTable.read(path).to_markdown() if path.exists() else f"*Not measured yet: no {path.name}.*"
        return f"{match[1]}{body}\n{_END}"

    return _TABLE.sub(fill, text)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a table is out of date")
    check = parser.parse_args(arguments).check
    text = README.read_text()
    made = with_tables(text)
    if made == text:
        return 0
    if check:
        print("README.md differs from experiments/results: run experiments/tables.py", file=sys.stderr)
        return 1
    README.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
