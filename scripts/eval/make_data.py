"""Convert downloaded files to JSONL files for scripts/eval_gpt_oss.py.

    python scripts/eval/make_data.py gpqa gpqa_diamond.csv DATA/gpqa_diamond.jsonl
    python scripts/eval/make_data.py needle TEXT DATA/needle.jsonl --characters 32000 120000

`gpqa` shuffles the choices of each question, always in the same way. `needle` hides one sentence
with a number in a piece of the text, at evenly spaced depths.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

LETTERS = "ABCD"
GPQA_COLUMNS = (
    "Question",
    "Correct Answer",
    "Incorrect Answer 1",
    "Incorrect Answer 2",
    "Incorrect Answer 3",
)
PLACE_WORDS = (
    "abbey bakery brewery castle chapel college foundry gallery harbour hospital library market "
    "mill mint museum observatory palace school station tannery theatre tower vineyard windmill"
)
PLACES = tuple(PLACE_WORDS.split(" "))

Line = dict[str, object]


def gpqa_lines(path: Path) -> Iterator[Line]:
    """Yield questions, choices in an order that depends on the question, and the right letter."""
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        missing = [name for name in GPQA_COLUMNS if name not in (reader.fieldnames or [])]
        if missing:
            raise ValueError(f"{path} has no column {missing[0]!r}; it needs {GPQA_COLUMNS}.")
        for number, row in enumerate(reader, 1):
            question, *choices = (str(row[name] or "").strip() for name in GPQA_COLUMNS)
            if not question or not all(choices) or len(set(choices)) < len(choices):
                raise ValueError(f"{path}: row {number} needs a question and 4 distinct answers.")
            right = choices[0]
            seed = hashlib.sha256(question.encode()).hexdigest()
            random.Random(seed).shuffle(choices)
            answer = LETTERS[choices.index(right)]
            yield {"question": question, "choices": choices, "answer": answer}


def needle_lines(text: str, *, lengths: Sequence[int], count: int, seed: int) -> Iterator[Line]:
    """Yield `count` questions for each length in characters."""
    if len(text) < max(lengths):
        raise ValueError(
            f"the text has {len(text)} characters, fewer than --characters {max(lengths)}"
        )
    rng = random.Random(seed)
    for length in lengths:
        for index in range(count):
            start = rng.randrange(len(text) - length + 1)
            place, number = rng.choice(PLACES), str(rng.randrange(1_000_000, 10_000_000))
            piece = text[start : start + length]
            cut = int(length * (index + 0.5) / count)
            cut = max(piece.rfind(" ", 0, cut), 0)
            needle = f" The secret number of the {place} is {number}."
            yield {
                "context": piece[:cut] + needle + piece[cut:],
                "question": (
                    f"What is the secret number of the {place} in the text above? "
                    "Answer with the number alone."
                ),
                "answer": number,
            }


def write_lines(path: Path, lines: Iterable[Line]) -> int:
    """Write a new file and return the number of lines."""
    if path.exists():
        raise ValueError(f"{path} exists already; choose a new name.")
    made = [json.dumps(line, ensure_ascii=False) + "\n" for line in lines]
    path.write_text("".join(made), encoding="utf-8")
    return len(made)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    gpqa = commands.add_parser("gpqa", help="gpqa_diamond.csv to JSONL")
    needle = commands.add_parser("needle", help="any long text to JSONL")
    for command in (gpqa, needle):
        command.add_argument("source", type=Path)
        command.add_argument("output", type=Path)
    needle.add_argument("--characters", type=int, nargs="+", default=[32000])
    needle.add_argument("--count", type=int, default=20, help="questions of each length")
    needle.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.command == "needle" and (min(options.characters) < 1 or options.count < 1):
        parser.error("--characters and --count must be positive.")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the file. Return 2 for a source that cannot be used."""
    options = parse_arguments(arguments)
    try:
        if options.command == "gpqa":
            lines = gpqa_lines(options.source)
        else:
            text = options.source.read_text(encoding="utf-8")
            lines = needle_lines(
                text, lengths=options.characters, count=options.count, seed=options.seed
            )
        count = write_lines(options.output, lines)
    except (ValueError, OSError) as error:
        print(f"make_data.py: {error}", file=sys.stderr)
        return 2
    print(f"{options.output}: {count} questions")
    return 0


if __name__ == "__main__":
    sys.exit(main())
