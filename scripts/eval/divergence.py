"""KL divergence and top-1 agreement with the 16-bit cache on given prompts, without a server.

Scores are stored prompt by prompt, so that an interrupted run resumes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from tqdm import tqdm

from eval.policies import REFERENCE, Policy
from lmdeploy.lite.divergence import raw_none
from lmdeploy.lite.prompt_engine import open_model
from lmdeploy.lite.report.cells import REFERENCE as REFERENCE_LABEL
from lmdeploy.lite.report.cells import KvVariant
from lmdeploy.lite.report.scores import ScoreFolder

Figures = dict[str, float | int]


def read_prompts(path: Path) -> list[str]:
    """Return the `text` of every line of a JSONL file, or a whole text file as one prompt."""
    try:
        whole = path.read_text(encoding="utf-8")
        if path.suffix != ".jsonl":
            return [whole]
        return [str(json.loads(line)["text"]) for line in whole.splitlines() if line.strip()]
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise ValueError(
            f"--prompts {path} is neither UTF-8 text nor JSON lines with text: {error!r}"
        ) from error


def measure(
    model_path: str,
    policies: Sequence[Policy],
    *,
    prompts: Sequence[str],
    name_of: Callable[[Policy], str],
    folder: Path,
) -> dict[str, Figures]:
    """Return the figures by policy. `name_of` names the scores of a policy in the folder."""
    config = policies[0].config()
    model = open_model(model_path, exact=config.exact, threads=config.num_threads)
    contexts = [model.loaded.tokenizer.encode(text) for text in prompts]
    if min(map(len, contexts)) < 2:
        raise ValueError("--prompts: each prompt needs at least 2 tokens.")
    cells = {REFERENCE: KvVariant(REFERENCE_LABEL, raw_none)}
    for policy in policies:
        if policy.label != REFERENCE:
            cells[policy.label] = KvVariant(name_of(policy), model.configure(policy.config()))
    scores = ScoreFolder(folder, list(cells.values()), contexts)
    with tqdm(total=scores.num_missing(), unit="prompt", desc="KL", disable=None) as bar:
        scores.fill(model, lambda _: bar.update() and None)
    return {label: scores.summary(cell) for label, cell in cells.items()}
