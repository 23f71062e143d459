"""The options, measurements and figures of one report.

Each measurement is saved in a folder next to the page. Therefore a run that was interrupted, or
that has more formats than before, continues.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lmdeploy.config.lite_options import ReportOptions
from lmdeploy.lite.divergence import cut_contexts
from lmdeploy.lite.prompt_engine import OpenModel, PromptEngine
from lmdeploy.lite.report import costs
from lmdeploy.lite.report.cells import REFERENCE, KvVariant
from lmdeploy.lite.report.scores import ScoreFolder
from lmdeploy.lite.retrieval import ask, make_prompt, recall_summary

TOKENS_PER_PAIR = 64  # tokens of context per pair; the pair and its question take 20 of them


class Measurements:
    """Measured values by key, saved in a JSON file. A saved value is not measured again."""

    def __init__(self, path: Path, facts: dict[str, Any]) -> None:
        """Open or create the file.

        `facts` are the inputs of the measurements, such as the hashes of model and texts. They are
        written at once, so that even an interrupted run saves them with its scores. New facts, such
        as another text, are added to the file.

        Raises:
            ValueError: if the file has other facts or is not a file of kv-report.
        """
        self._path, self._facts = path, facts
        self._values: dict[str, Any] = {}
        if not path.exists():
            self.put({})
            return
        try:
            held = json.loads(path.read_text(encoding="utf-8"))
            known = dict(held["facts"])
            different = [name for name in facts if known.get(name, facts[name]) != facts[name]]
            self._values = dict(held["values"])
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"{path}: It is not a file of kv-report. Delete its folder."
            ) from error
        if different:
            raise ValueError(
                f"{path.parent}: The measurements are of another {', '.join(different)}. Delete "
                "the folder, or change --output or --name."
            )
        self._facts = known | facts
        self.put({})

    def get(self, key: str, measure: Callable[[], Any]) -> Any:
        """Return the value of `key`. If it is not saved, call `measure` and save the result."""
        if key not in self._values:
            self.put({key: measure()})
        return self._values[key]

    def has(self, key: str) -> bool:
        return key in self._values

    def put(self, values: dict[str, Any]) -> None:
        """Add values and write the file atomically."""
        self._values |= values
        self._path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._path.with_suffix(".part")
        text = json.dumps({"facts": self._facts, "values": self._values}, indent=1)
        unfinished.write_text(text + "\n", encoding="utf-8")
        unfinished.rename(self._path)


@dataclass
class Report:
    """One run of kv-report. The figures are in `figures[label]["texts"][text][context]` etc."""

    options: ReportOptions
    model: OpenModel
    cells: list[KvVariant]
    ids: dict[str, list[int]]  # by text
    measured: Measurements
    picture: bool = True  # whether the page has a picture
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)

    def run(self) -> None:
        """Measure everything that is not saved and compute the figures."""
        for cell in self.cells:
            self.figures[cell.label] = {"texts": {}, "retrieval": {}, "decode": {}}
        for index, text in enumerate(self.ids):
            contexts = self.options.contexts if index == 0 else self.options.contexts[:1]
            for context in contexts:
                self._score(text, context)
        for context in self.options.contexts:
            self._retrieve(context)
        self._costs()
        self._decode()

    def _score(self, text: str, context: int) -> None:
        contexts = cut_contexts(self.ids[text], context, max_tokens=self.options.max_tokens)
        folder = ScoreFolder(self.options.parts / text / str(context), self.cells, contexts)
        with Progress(folder.num_missing(), f"{text}, context {context}") as bar:
            folder.fill(self.model, bar)
        for cell in self.cells:
            per_text = self.figures[cell.label]["texts"].setdefault(text, {})
            per_text[str(context)] = folder.summary(cell)

    def _retrieve(self, context: int) -> None:
        keys = {
            (cell.label, seed): f"retrieval/{context}/{seed}/{cell.label}"
            for cell in self.cells
            for seed in range(self.options.retrieval_prompts)
        }
        missing = sum(not self.measured.has(key) for key in keys.values())
        with Progress(missing, f"retrieval, context {context}") as bar:
            for cell in self.cells:
                answers = []
                for seed in range(self.options.retrieval_prompts):
                    key = keys[cell.label, seed]
                    if not self.measured.has(key):
                        self.measured.put({key: self._ask(cell, context, seed=seed)})
                        bar(cell.label)
                    answers += self.measured.get(key, list)
                summary = recall_summary(np.array(answers))
                self.figures[cell.label]["retrieval"][str(context)] = summary

    def _ask(self, cell: KvVariant, context: int, *, seed: int) -> list[list[float]]:
        filler = next(iter(self.ids.values()))
        start = seed * len(filler) // self.options.retrieval_prompts
        prompt = make_prompt(
            lambda text: self.model.loaded.tokenizer.encode(text, add_special=False),
            filler[start:] + filler[:start],
            context=context,
            pairs=min(context // TOKENS_PER_PAIR, 96),
            seed=seed,
        )
        with PromptEngine(self.model, cell.configure, context=len(prompt.ids)) as engine:
            rows: list[list[float]] = ask(engine, prompt).tolist()
        return rows

    def _costs(self) -> None:
        prompt = next(iter(self.ids.values()))[: self.options.contexts[0]]
        with Progress(len(self.cells), "costs") as bar:
            for cell in self.cells:
                row = self.figures[cell.label]
                row["bits_per_value"] = costs.bits_per_value(self.model, cell)
                row["write_ns_per_token"] = self.measured.get(
                    f"write/{cell.label}",
                    lambda cell=cell: costs.write_ns_per_token(self.model, cell),  # type: ignore[misc]
                )
                counts = None
                if self.model.has_statistics:
                    counts = self.measured.get(
                        f"saturated heads/{cell.label}",
                        lambda cell=cell: costs.saturated_heads(  # type: ignore[misc]
                            costs.stored_histograms(self.model, cell, prompt=prompt), cell
                        ),
                    )
                row["saturated"] = None if counts is None else int(np.sum([*counts.values()]))
                row["saturated_heads"] = counts
                bar(cell.label)

    def _decode(self) -> None:
        prompt = next(iter(self.ids.values()))
        for context in self.options.contexts:
            for family in costs.families(self.cells):
                key = f"decode/{context}/" + ",".join(cell.label for cell in family)
                if not self.measured.has(key):
                    turns = len(family) * (costs.DECODE_ROUNDS + 1)
                    with Progress(turns, f"decode, context {context}") as bar:
                        speeds = costs.decode_speeds(
                            self.model, family, prompt=prompt[:context], done=bar
                        )
                    self.measured.put({key: speeds})
                self._add_speeds(str(context), self.measured.get(key, dict))

    def _add_speeds(self, context: str, speeds: dict[str, float]) -> None:
        for label, speed in speeds.items():
            raw = None if label == REFERENCE else speeds.get(label.partition("/")[0])
            row = {"tokens_per_s": speed, "to_raw": speed / raw if raw else None}
            row["to_none"] = speed / speeds[REFERENCE]
            self.figures[label]["decode"].setdefault(context, row)


class Progress:
    """A progress bar of `total` steps, shown only on a terminal. Call it after each step."""

    def __init__(self, total: int, what: str) -> None:
        from tqdm import tqdm

        self._bar = tqdm(total=total, desc=what, disable=None if total else True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def __call__(self, label: str) -> None:
        self._bar.set_postfix_str(label)
        self._bar.update()
