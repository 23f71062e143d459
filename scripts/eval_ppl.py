"""What a KV format costs in accuracy: perplexity, KL divergence and top-1 agreement with `none`.

    scripts/eval_ppl.py MODEL TEXT --modes none,int8,nvfp4 --context 2048 --max-tokens 20000

The text is cut into contexts of N tokens that know nothing of each other. Every position but the
last of each context counts: its logits come from the engine while it reads the prompt, with K and
V stored in the format. KL is KL(none || mode) in nats. Int8 activations answer to the smallest
change with noise of their own (about 0.004), so the default is to compute in FP32. Memory is
bounded by one piece of logits; those of `none` wait in a temporary file for one context at a time.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from lmdeploy import _turbomind

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

MODES = ("none", "int8", "fp8", "fp8_e5m2", "nvfp4", "int4", "mxfp4")
PIECE_TOKENS = 128  # positions per piece of logits: 25 MB with a vocabulary of 49 152
STALL_MS = 600_000


@dataclass
class Score:
    """Sums over the positions seen so far."""

    log_loss: float = 0.0
    agreed: int = 0
    tokens: int = 0
    divergences: list[Doubles] = field(default_factory=list)

    def add(self, logits: Floats, reference: Floats, *, targets: npt.NDArray[np.int64]) -> None:
        """Count positions: `logits` and `reference` [n, vocab] predict `targets` [n]."""
        ours, theirs = log_softmax(logits), log_softmax(reference)
        self.log_loss -= float(ours[np.arange(len(targets)), targets].sum())
        self.agreed += int((logits.argmax(axis=1) == reference.argmax(axis=1)).sum())
        self.divergences.append((np.exp(theirs) * (theirs - ours)).sum(axis=1))
        self.tokens += len(targets)

    def report(self) -> dict[str, float | int]:
        """The figures of one mode, as they go into the JSON file."""
        divergence = np.concatenate(self.divergences)
        return {
            "ppl": float(np.exp(self.log_loss / self.tokens)),
            "kl_mean": float(divergence.mean()),
            "kl_p99": float(np.quantile(divergence, 0.99)),
            "top1": self.agreed / self.tokens,
            "tokens": self.tokens,
        }


def log_softmax(logits: Floats) -> Doubles:
    """Rows of logits to log-probabilities, in double precision."""
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


def cut_contexts(ids: Sequence[int], context: int, *, max_tokens: int) -> list[list[int]]:
    """Whole contexts of the first `max_tokens` ids.

    Raises:
        ValueError: when there is not one whole context.
    """
    usable = min(len(ids), max_tokens)
    if usable < context:
        raise ValueError(
            f"{usable} tokens do not fill one context of {context}: give a longer text, "
            "a larger --max-tokens or a smaller --context"
        )
    return [list(ids[i : i + context]) for i in range(0, usable - context + 1, context)]


class PromptLogits:
    """One engine with one KV format: the logits of every position of a prompt, in pieces."""

    def __init__(
        self,
        model: _turbomind.ModelConfig,
        weights: _turbomind.Weights,
        *,
        mode: str,
        context: int,
        threads: int,
    ) -> None:
        from lmdeploy import _turbomind

        options = _turbomind.EngineConfig()
        options.kv_mode = _turbomind.get_kv_cache_mode(mode)
        options.max_batch_size, options.session_len = 1, context + 1
        options.max_prefill_token_num = PIECE_TOKENS
        options.cache_max_entry_count = 0.5
        options.enable_prefix_caching = False
        device = _turbomind.make_cpu_device(threads)
        self._request_type = _turbomind.Request
        self._engine = _turbomind.Engine(model, options, weights, device, free_memory())
        self._next_id = 1

    def pieces(self, prompt: list[int]) -> Iterator[Floats]:
        """Arrays [n, vocab] that cover the prompt in order."""
        request = self._request_type()
        request.id, request.prompt, request.max_new_tokens = self._next_id, prompt, 1
        request.ignore_eos, request.logits_output = True, "all"
        self._next_id += 1
        self._engine.submit(request)
        wanted = len(prompt)
        while True:
            outputs = self._engine.wait_outputs(STALL_MS)
            if not outputs:
                raise RuntimeError(f"no logits within {STALL_MS} ms: {self._engine.failure}")
            for output in outputs:
                if output.error:
                    raise RuntimeError(output.error)
                if output.logits is not None and wanted > 0:
                    yield output.logits[:wanted]
                    wanted -= len(output.logits)
                if output.finish_reason != "none":
                    if wanted > 0:
                        raise RuntimeError(f"logits of {wanted} positions did not come")
                    return

    def close(self) -> None:
        """Stop the engine."""
        self._engine.close()


def free_memory() -> int:
    """Bytes that the system would still hand out."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo names no MemAvailable")


def score_context(
    engines: dict[str, PromptLogits],
    scores: dict[str, Score],
    *,
    ids: list[int],
    reference: Floats,
) -> Iterator[str]:
    """Add one context to all scores; yields each mode when it is done.

    `reference` [context, vocab] is room for the logits of `none`.
    """
    targets = np.array(ids[1:], np.int64)
    for mode, engine in engines.items():
        start = 0
        for piece in engine.pieces(ids):
            if mode == "none":
                reference[start : start + len(piece)] = piece
            count = min(len(piece), len(targets) - start)
            if count > 0 and mode in scores:
                rows = slice(start, start + count)
                scores[mode].add(piece[:count], reference[rows], targets=targets[rows])
            start += len(piece)
        yield mode


def evaluate(
    model: str,
    text: str,
    *,
    modes: Sequence[str],
    context: int,
    max_tokens: int,
    exact: bool = True,
) -> dict[str, dict[str, float | int]]:
    """Figures per mode; `none` is run in any case and reported when it is among `modes`.

    Raises:
        ValueError: for an unknown mode, a text that is too short or a model that cannot be read.
    """
    import os

    from tqdm import tqdm

    from lmdeploy import _turbomind
    from lmdeploy.turbomind.loader import load_model, read_model_info

    threads = len(os.sched_getaffinity(0))
    resolved = ["none", *(mode for mode in modes if mode != "none")]
    for mode in resolved:
        _turbomind.get_kv_cache_mode(mode)
    device = _turbomind.make_cpu_device(threads)
    # Exact compute alone would keep `none`, scales and zeros in FP32, which no server stores.
    served_dtype = read_model_info(model).config.dtype
    loaded = load_model(model, dtype=served_dtype, exact=exact, device=device)
    ids = loaded.tokenizer.encode(text, add_special=False)
    contexts = cut_contexts(ids, context, max_tokens=max_tokens)
    engines = {
        mode: PromptLogits(
            loaded.config, loaded.weights, mode=mode, context=context, threads=threads
        )
        for mode in resolved
    }
    scores = {mode: Score() for mode in modes}
    shape = (context, loaded.config.vocab_size)
    try:
        with (
            tempfile.TemporaryFile() as file,
            tqdm(total=len(contexts) * len(resolved), unit="context", disable=None) as bar,
        ):
            reference: Floats = np.memmap(file, np.float32, "w+", shape=shape)
            for context_ids in contexts:
                for mode in score_context(engines, scores, ids=context_ids, reference=reference):
                    bar.set_postfix_str(mode)
                    bar.update()
    finally:
        for engine in engines.values():
            engine.close()
    return {mode: score.report() for mode, score in scores.items()}


def print_table(figures: dict[str, dict[str, float | int]]) -> None:
    """One line per mode."""
    print(f"{'mode':<10} {'ppl':>9} {'KL mean':>10} {'KL p99':>10} {'top-1':>8} {'tokens':>8}")
    for mode, row in figures.items():
        print(
            f"{mode:<10} {row['ppl']:>9.4f} {row['kl_mean']:>10.6f} {row['kl_p99']:>10.5f} "
            f"{row['top1']:>8.4f} {row['tokens']:>8}"
        )


def positive(text: str) -> int:
    """An argument that must be a positive integer."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a positive integer")
    return int(text)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model", help="folder, GGUF file, hub id or smollm2")
    parser.add_argument("text", type=Path, help="UTF-8 text file")
    parser.add_argument("--modes", default=",".join(MODES), help="default: %(default)s")
    parser.add_argument("--context", type=positive, default=2048)
    parser.add_argument("--max-tokens", type=positive, default=1 << 30, help="of the text")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument(
        "--exact",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="FP32 compute, so that the format alone counts; --no-exact computes as when serving",
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Evaluate, print a table, write the JSON file."""
    options = parse_arguments(arguments)
    try:
        text = options.text.read_text(encoding="utf-8")
        figures = evaluate(
            options.model,
            text,
            modes=options.modes.split(","),
            context=options.context,
            max_tokens=options.max_tokens,
            exact=options.exact,
        )
    except (ValueError, OSError) as error:
        print(f"eval_ppl.py: {error}", file=sys.stderr)
        return 2
    print_table(figures)
    if options.json:
        facts = {
            "model": options.model,
            "text": options.text.name,
            "context": options.context,
            "exact": options.exact,
            "modes": figures,
        }
        options.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
