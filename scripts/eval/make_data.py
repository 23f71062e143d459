"""Convert downloaded files to JSONL files for scripts/eval_gpt_oss.py.

    python scripts/eval/make_data.py gpqa gpqa_diamond.csv DATA/gpqa_diamond.jsonl
    python scripts/eval/make_data.py needle TEXT DATA/needle.jsonl --characters 32000 120000

`gpqa` shuffles the choices of each question, always in the same way. `needle` hides one sentence
with a number in a piece of the text, at evenly spaced depths.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

WRONG_ANSWERS = ("Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
PLACES = ("bakery", "castle", "chapel", "foundry", "harbour", "library", "mill", "mint", "theatre")

Line = dict[str, object]


def gpqa_lines(path: Path) -> Iterator[Line]:
    """Yield questions, choices in an order that depends on the question, and the right letter."""
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            right, *wrong = (row[name].strip() for name in ("Correct Answer", *WRONG_ANSWERS))
            question, choices = row["Question"].strip(), [right, *wrong]
            random.Random(question).shuffle(choices)
            yield {"question": question, "choices": choices, "answer": "ABCD"[choices.index(right)]}


def needle_lines(text: str, *, lengths: Sequence[int], count: int) -> Iterator[Line]:
    """Yield `count` questions for each length in characters."""
    rng = random.Random(0)
    for length in lengths:
        for index in range(count):
            start = rng.randrange(len(text) - length + 1)
            place, number = rng.choice(PLACES), str(rng.randrange(1_000_000, 10_000_000))
            piece = text[start : start + length]
            cut = max(piece.rfind(" ", 0, int(length * (index + 0.5) / count)), 0)
            needle = f" The secret number of the {place} is {number}."
            question = f"What is the secret number of the {place} in the text above? "
            yield {
                "context": piece[:cut] + needle + piece[cut:],
                "question": question + "Answer with the number alone.",
                "answer": number,
            }


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the file. Return 2 for a source that cannot be used."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("command", choices=("gpqa", "needle"))
    parser.add_argument("source", type=Path, help="gpqa_diamond.csv, or any long text")
    parser.add_argument("output", type=Path, help="new JSONL file")
    parser.add_argument("--characters", type=int, nargs="+", default=[32000], help="of needle")
    parser.add_argument("--count", type=int, default=20, help="questions of each length of needle")
    options = parser.parse_args(arguments)
    try:
        if options.command == "gpqa":
            lines = list(gpqa_lines(options.source))
        else:
            text = options.source.read_text(encoding="utf-8")
            lines = list(needle_lines(text, lengths=options.characters, count=options.count))
        with options.output.open("x", encoding="utf-8") as file:
            file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    except (ValueError, KeyError, AttributeError, OSError) as error:
        print(f"make_data.py: {options.source} cannot be used: {error!r}", file=sys.stderr)
        return 2
    print(f"{options.output}: {len(lines)} questions")
    return 0


if __name__ == "__main__":
    sys.exit(main())
