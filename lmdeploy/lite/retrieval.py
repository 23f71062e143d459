"""Measures recall of key-value pairs that are planted over a whole context, by depth.

A prompt is filler text with one line per pair, such as "lantern = 4193;", at equal distances. At
its end all lines follow once more in another order, as questions. The prompt contains the values,
so a single prefill answers all questions. A value is recalled if each of its tokens is the argmax.
The log probability of a value is more informative if recall is low.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from lmdeploy.lite.divergence import Doubles, log_sums
from lmdeploy.lite.prompt_engine import PromptEngine

DEPTHS = 10  # tenths of the context
# Keys are different words, so that even SmolLM2-135M can find them by their first token.
WORDS = (
    "lantern bridge garden castle wagon mirror bottle candle hammer basket window ladder pocket "
    "saddle trumpet anchor blanket kettle compass drawer feather helmet jacket needle pillow "
    "ribbon spoon table violin wheel barrel carpet apple river copper winter market doctor "
    "silver planet guitar butter forest monkey camera island pepper dragon cotton rocket tunnel "
    "velvet yellow zebra bishop desert engine falcon garlic harbor jungle button cradle dinner "
    "eagle finger ginger hotel iron jewel kitchen lemon magnet napkin olive parrot quilt rabbit "
    "sailor teapot uncle valley walnut arrow bakery cabin daisy elbow flute glove honey insect "
    "lizard mustard nest orange pebble queen robin salmon tiger umbrella village whistle acorn "
    "beetle cherry donkey fabric goose hazel icicle lobster marble onion pencil rifle spider "
    "tomato turtle wallet"
)
KEYS = tuple(WORDS.split(" "))

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class Question:
    """The positions of a value in the questions at the end of a prompt."""

    start: int
    tokens: int
    depth: float  # relative position of the planted line, 0 to 1


@dataclass(frozen=True)
class RetrievalPrompt:
    """A prompt and its questions in order of position."""

    ids: list[int]
    questions: list[Question]


def make_pairs(count: int, rng: random.Random) -> list[tuple[str, str]]:
    """Return `count` distinct keys with distinct numbers of four digits.

    Raises:
        ValueError: if there are fewer keys than `count`.
    """
    if count > len(KEYS):
        raise ValueError(f"pairs is {count}. It must be at most {len(KEYS)}.")
    numbers = rng.sample(range(1000, 10000), count)
    return list(zip(rng.sample(KEYS, count), (str(n) for n in numbers), strict=True))


def make_prompt(
    encode: Encode, filler: Sequence[int], *, context: int, pairs: int, seed: int
) -> RetrievalPrompt:
    """Make a prompt of at most `context` tokens from `pairs` pairs and the text `filler`.

    Raises:
        ValueError: if the pairs do not fit, or the filler is too short.
    """
    rng = random.Random(seed)
    planted = make_pairs(pairs, rng)
    lines = [(f"\n{key} =", f" {value}", ";\n") for key, value in planted]
    encoded = [tuple(list(encode(part)) for part in line) for line in lines]
    taken = 2 * sum(len(part) for line in encoded for part in line)
    room = context - taken
    if room < pairs or len(filler) < room:
        raise ValueError(
            f"{pairs} pairs take {taken} of {context} tokens, and the text has {len(filler)}. Use "
            "a larger context, fewer pairs or a longer text."
        )
    ids: list[int] = []
    where: list[int] = []
    for index, line in enumerate(encoded):
        ids += filler[index * room // pairs : (index + 1) * room // pairs]
        where.append(len(ids))
        ids += [token for part in line for token in part]
    planted_tokens = len(ids)
    questions = []
    for index in rng.sample(range(pairs), pairs):
        key, value, end = encoded[index]
        start = len(ids) + len(key)
        questions.append(Question(start, len(value), where[index] / planted_tokens))
        ids += [*key, *value, *end]
    return RetrievalPrompt(ids, questions)


def ask(engine: PromptEngine, prompt: RetrievalPrompt) -> Doubles:
    """Run a prompt and return its results, [questions, 3].

    The columns are the depth, 1 if the value was recalled (else 0), and its log probability.
    """
    predictors = {
        question.start + i - 1: (index, prompt.ids[question.start + i])
        for index, question in enumerate(prompt.questions)
        for i in range(question.tokens)
    }
    result = np.array([[question.depth, 1.0, 0.0] for question in prompt.questions])
    start = 0
    for piece in engine.pieces(prompt.ids):
        rows = [p for p in range(start, start + len(piece)) if p in predictors]
        if rows:
            logits = piece[np.array(rows) - start]
            sums, best = log_sums(logits), logits.argmax(axis=1)
            for i, position in enumerate(rows):
                index, token = predictors[position]
                result[index, 1] *= best[i] == token
                result[index, 2] += float(logits[i, token]) - sums[i]
        start += len(piece)
    return result


def recall_summary(answers: Doubles) -> dict[str, float | int | list[float | None]]:
    """Return the recall, the mean log probability, and the recall by tenths of the depth.

    A tenth without questions has the recall None.
    """
    tenth = np.minimum((answers[:, 0] * DEPTHS).astype(int), DEPTHS - 1)
    by_depth: list[float | None] = []
    for i in range(DEPTHS):
        here = answers[tenth == i, 1]
        by_depth.append(float(here.mean()) if len(here) else None)
    return {
        "recall": float(answers[:, 1].mean()),
        "log_prob": float(answers[:, 2].mean()),
        "by_depth": by_depth,
        "questions": len(answers),
    }
