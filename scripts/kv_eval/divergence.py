"""KL and top-1 against the 16-bit cache on given prompts, without a server.

Scores are kept prompt by prompt, so that an interrupted run goes on where it was.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from kv_eval.policies import REFERENCE, Policy
from lmdeploy.lite.prompt_engine import open_model
from lmdeploy.lite.report.cells import REFERENCE as REFERENCE_LABEL
from lmdeploy.lite.report.cells import KvCell
from lmdeploy.lite.report.scores import ScoreFolder

MIN_TOKENS = 2

Figures = dict[str, float | int]


def read_prompts(path: Path) -> list[str]:
    """The `text` of every line of a JSONL file, or a whole text file as one prompt.

    Raises ValueError that names file, line, field, got and wanted.
    """
    if not path.is_file():
        raise ValueError(f"--prompts: {path} is missing; wanted a .txt or .jsonl file")
    try:
        whole = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"--prompts: {path} is not UTF-8 ({error.reason})") from error
    if path.suffix != ".jsonl":
        return [whole]
    texts = []
    for number, line in enumerate(whole.splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"--prompts: {path}:{number}: not JSON: {error}") from error
        text = value.get("text") if isinstance(value, dict) else None
        if not isinstance(text, str) or not text:
            raise ValueError(f"--prompts: {path}:{number}: text: got {text!r}, wanted a string")
        texts.append(text)
    if not texts:
        raise ValueError(f"--prompts: {path} has no lines")
    return texts


def measure(
    model_path: str,
    policies: Sequence[Policy],
    *,
    prompts: Sequence[str],
    name_of: Callable[[Policy], str],
    folder: Path,
) -> dict[str, Figures]:
    """Figures by label of the policy; `name_of` names a policy's scores in the folder.

    Computes as a server does. Raises ValueError for a model that cannot be read and for prompts
    that are too short.
    """
    config = policies[0].config()
    model = open_model(model_path, exact=config.exact, threads=config.num_threads)
    contexts = [model.loaded.tokenizer.encode(text) for text in prompts]
    for index, ids in enumerate(contexts):
        if len(ids) < MIN_TOKENS:
            raise ValueError(f"--prompts: prompt {index + 1} has {len(ids)} tokens, wanted 2")
    reference = KvCell(REFERENCE_LABEL, model.configure(Policy(REFERENCE, None, ()).config()))
    cells = {
        policy.label: KvCell(name_of(policy), model.configure(policy.config()))
        for policy in policies
        if policy.label != REFERENCE
    }
    scores = ScoreFolder(folder, [reference, *cells.values()], contexts)
    from tqdm import tqdm

    with tqdm(total=scores.num_missing(), unit="prompt", desc="KL", disable=None) as bar:

        def done(_: str) -> None:
            bar.update()

        scores.fill(model, done)
    figures = {label: scores.summary(cell) for label, cell in cells.items()}
    return {REFERENCE: scores.summary(reference)} | figures
