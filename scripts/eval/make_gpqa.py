"""Convert gpqa_diamond.csv to the JSONL file of the task gpqa_diamond.

    python scripts/eval/make_gpqa.py gpqa_diamond.csv DATA/gpqa_diamond.jsonl

The choices of each question are shuffled, always in the same way.
"""

from __future__ import annotations

import csv
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

WRONG_ANSWERS = ("Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")

Line = dict[str, object]


def gpqa_lines(path: Path) -> Iterator[Line]:
    """Yield questions, choices in an order that depends on the question, and the right letter."""
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            right, *wrong = (row[name].strip() for name in ("Correct Answer", *WRONG_ANSWERS))
            question, choices = row["Question"].strip(), [right, *wrong]
            random.Random(question).shuffle(choices)
            yield {"question": question, "choices": choices, "answer": "ABCD"[choices.index(right)]}


def main(source: Path, output: Path) -> None:
    """Write the file, which must not exist."""
    with output.open("x", encoding="utf-8") as file:
        for line in gpqa_lines(source):
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), Path(sys.argv[2]))
    except (ValueError, KeyError, AttributeError, OSError, IndexError) as error:
        sys.exit(f"make_gpqa.py: the file cannot be converted: {error!r}")
