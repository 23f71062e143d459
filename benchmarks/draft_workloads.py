"""Prompts and reference answers with which speculative decoding is measured (bench_drafts.py)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Workload:
    """A question and the answer that a good model would give.

    `target` is the least ratio of speeds with and without drafts.
    """

    name: str
    question: str
    reference: str
    target: float


_FUNCTION = '''
def {verb}_{noun}(path: Path, {noun}s: list[{type}]) -> {result}:
    """{sentence}"""
    with path.open("{mode}", encoding="utf-8") as file:
        {body}
'''
_FUNCTIONS = (
    {
        "verb": "read",
        "noun": "price",
        "type": "float",
        "result": "int",
        "mode": "r",
        "sentence": "Append the prices of a file and return how many there were.",
        "body": "found = [float(line) for line in file if line.strip()]\n"
        "    prices.extend(found)\n    return len(found)",
    },
    {
        "verb": "save",
        "noun": "order",
        "type": "Order",
        "result": "None",
        "mode": "w",
        "sentence": "Write one line for every open order.",
        "body": "for order in orders:\n            if order.is_open:\n"
        '                file.write(f"{order.number};{order.total:.2f}\\n")',
    },
    {
        "verb": "count",
        "noun": "word",
        "type": "str",
        "result": "Counter[str]",
        "mode": "r",
        "sentence": "Count how often each of the given words occurs in a text.",
        "body": "text = file.read().lower().split()\n"
        "    return Counter(part for part in text if part in set(words))",
    },
    {
        "verb": "merge",
        "noun": "label",
        "type": "Label",
        "result": "bool",
        "mode": "a",
        "sentence": "Add missing labels to a file and say whether it has changed.",
        "body": "known = load_labels(path)\n        missing = sorted(set(labels) - known)\n"
        '        file.writelines(f"{label}\\n" for label in missing)\n'
        "    return bool(missing)",
    },
)


def _code_edit() -> Workload:
    file = "from collections import Counter\nfrom pathlib import Path\n\nENCODING_ERRORS = 0\n"
    file += "".join(f"\n{_FUNCTION.format(**values)}" for values in _FUNCTIONS)
    edited = file.replace("{order.total:.2f}", "{order.total:.3f}").replace(
        "Write one line for every open order.", "Write number and total of every open order."
    )
    question = (
        f"Here is a Python file:\n\n```python\n{file}```\n\nIn save_order, write totals with three "
        "decimals and begin the docstring with 'Write number and total'. Return the whole file."
    )
    return Workload("code edit", question, f"```python\n{edited}```", 2.0)


def _json_extraction() -> Workload:
    rng = np.random.default_rng(7)
    names = ("Marta Lindqvist", "Joaquin Ferrer", "Adaeze Okonkwo", "Piotr Zielinski", "Hana Sato")
    streets = ("Harbor Street", "Old Mill Lane", "Cathedral Square", "Juniper Road", "Station Way")
    goods = ("walnut desks", "brass lamps", "linen curtains", "oak shelves", "wool carpets")
    sentences, rows = [], []
    for name, street, good in zip(names, streets, goods, strict=True):
        number, count, price = (int(rng.integers(10, high)) for high in (999, 90, 9000))
        day = f"2024-{int(rng.integers(1, 13)):02}-{int(rng.integers(1, 29)):02}"
        sentences.append(
            f"On {day} we sent {count} {good} to {name}, who lives at {number} {street}. The "
            f"invoice over {price} euros was paid after the usual reminder."
        )
        rows.append(
            f'  {{"customer": "{name}", "address": "{number} {street}", "date": "{day}", '
            f'"goods": "{good}", "count": {count}, "price": {price}}}'
        )
    question = (
        "Extract every delivery from this letter as a JSON list. Each object has the keys "
        f"customer, address, date, goods, count and price.\n\n{' '.join(sentences)}"
    )
    answer = "[\n" + ",\n".join(rows) + "\n]"
    return Workload("JSON extraction", question, answer, 1.8)


_REPORT = (
    "The river rose four meters within nine hours and flooded the lower town before dawn.",
    "Most residents had left their houses on the evening before, after the second warning.",
    "The old stone bridge held, although three of its arches were blocked by driftwood.",
    "Engineers had asked for a new gauge upstream in two reports, but no money was found.",
    "The pumping station failed at midnight because its generator stood in the cellar.",
    "Volunteers carried the archive of the library to the second floor in one long chain.",
    "The mayor expects that repairs will take two years and cost eleven million euros.",
    "A fund for families without insurance was opened on Tuesday by the neighboring cities.",
)
_COMMENTS = (
    "A flood hit the town faster than anybody had planned for. The article opens with it:",
    "Nobody was hurt, which the author credits to people who acted early:",
    "Then the text turns to what could have been prevented. It criticizes the authorities:",
    "Bad placement of equipment made matters worse:",
    "At the end there is an estimate of the damage, for which help is on its way:",
)


def _quotes() -> Workload:
    quoted = (_REPORT[0], _REPORT[1], _REPORT[3], _REPORT[4], f"{_REPORT[6]} {_REPORT[7]}")
    pairs = zip(_COMMENTS, quoted, strict=True)
    closing = (
        "\n\nTaken together, the piece praises the citizens and blames years of saving at the "
        "wrong end, without naming a single person."
    )
    question = (
        "Summarize this article in a few sentences. Support each of them with a literal quote.\n\n"
        + " ".join(_REPORT)
    )
    answer = "\n\n".join(f'{comment} "{quote}"' for comment, quote in pairs) + closing
    return Workload("quotes", question, answer, 1.3)


_PROSE = """\
Every evening, when the last ferry had gone, Ines climbed the hundred and twelve steps with a
thermos under her arm. Nobody had asked her to. The lamp had run by itself since the year her
father retired, a gray box in the cellar switching it on at dusk, and the harbor office sent a
technician each spring who was afraid of heights. Still she went. Up there the glass hummed in
the wind, and she could see how far the dark had come.

On the night of the storm the box stopped. She heard it before she understood: a hum that had
been under everything was missing, like a clock taken out of a room. Below, between the rocks, a
fishing boat was feeling its way home by a light that no longer turned. Ines did not think about
it for long. She pulled the canvas off the old mechanism, oiled what she could reach, and leaned
her weight against the crank until iron moved. Then she walked, slowly, in a circle, hour after
hour, her shoulder pushing the great lens ahead of her. Toward morning somebody knocked. It was
a boy in yellow oilskins, dripping on the stone floor, who wanted to know why the beam had been
so uneven. She gave him the rest of the tea and laughed until she had to sit down."""


def _prose() -> Workload:
    question = "Write a short story about a lighthouse. Invent a keeper who has nothing to do."
    return Workload("free prose", question, _PROSE, 0.98)


def workloads() -> tuple[Workload, ...]:
    """Return the four workloads, from the one that repeats most to the one that repeats least."""
    return _code_edit(), _json_extraction(), _quotes(), _prose()


def topics() -> list[str]:
    """Return questions for free prose that can be answered side by side."""
    places = ("a lighthouse", "a bakery", "an observatory", "a railway station")
    people = ("a retired pilot", "two sisters", "a clockmaker", "a stranger without luggage")
    return [
        f"Write a short story about {person} in {place}." for place in places for person in people
    ]
