"""KL divergence and top-1 agreement with the 16-bit cache on given prompts, without a server.

Scores are stored prompt by prompt, so that an interrupted run resumes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from eval.policies import REFERENCE, Policy
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
    from tqdm import tqdm

    config = policies[0].config()
    model = open_model(model_path, exact=config.exact, threads=config.num_threads)
    contexts = [model.loaded.tokenizer.encode(text) for text in prompts]
    for index, ids in enumerate(contexts):
        if len(ids) < 2:
            raise ValueError(f"--prompts: prompt {index + 1} has {len(ids)} tokens; it needs 2.")
    reference = KvVariant(REFERENCE_LABEL, model.configure(Policy(REFERENCE, None, ()).config()))
    cells = {
        policy.label: KvVariant(name_of(policy), model.configure(policy.config()))
        for policy in policies
        if policy.label != REFERENCE
    }
    scores = ScoreFolder(folder, [reference, *cells.values()], contexts)
    with tqdm(total=scores.num_missing(), unit="prompt", desc="KL", disable=None) as bar:
        scores.fill(model, lambda _: bar.update() and None)
    figures = {label: scores.summary(cell) for label, cell in cells.items()}
    return {REFERENCE: scores.summary(reference)} | figures
