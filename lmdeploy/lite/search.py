"""`lmdeploy lite kv-search`: finds a format per layer with the lowest KL within a budget of bits.

The search measures the KL of the model with one layer in a candidate format and all others in 16
bit. The KL of a table is estimated as the sum over its layers. The table with the lowest sum within
the budget is found exactly. Then that table is measured and compared with the uniform candidates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmdeploy.base.checks import refuse
from lmdeploy.config.engine import TurbomindEngineConfig
from lmdeploy.config.kv_format_options import FormatPair, parse_pair
from lmdeploy.config.lite_options import SearchOptions
from lmdeploy.engine.kv_quality import resolve_kv_options
from lmdeploy.engine.plan import longest_position
from lmdeploy.lite.divergence import cut_contexts, evaluate, read_text
from lmdeploy.lite.prompt_engine import OpenModel, open_model

NONE = FormatPair("none", "none")
_RESULT = "table"


@dataclass(frozen=True)
class Measured:
    """The size and the mean KL of the model with one format in all layers."""

    bits: float
    kl_mean: float


@dataclass(frozen=True)
class SearchResult:
    """The proposed table and the measurements behind it."""

    table: tuple[FormatPair, ...]  # by layer
    bits: float
    kl_mean: float  # measured
    predicted_kl: float  # the sum over layers, which the search minimizes
    layer_kl: dict[FormatPair, list[float]]  # by candidate and layer
    uniform: dict[FormatPair, Measured]
    yaml: str


def search_file(model_path: str, text_path: Path, *, options: SearchOptions) -> SearchResult:
    """Run the search on a UTF-8 text file.

    Raise ValueError if the budget is too small or the text, the model or an option is wrong.
    """
    text = read_text(text_path)
    model = open_model(model_path, exact=options.exact)
    ids = model.loaded.tokenizer.encode(text, add_special=False)
    context = min(options.context, longest_position(model.config))
    check_context(model, context, options=options)
    return search(model, cut_contexts(ids, context, max_tokens=options.tokens), options=options)


def check_context(model: OpenModel, context: int, *, options: SearchOptions) -> None:
    """Raise ValueError if whole prompts stay in the window, so that no format could differ."""
    for name in options.formats:
        kv = resolve_kv_options(
            options.config(parse_pair(name)),
            model.config.windows,
            k_bias=model.config.k_bias,
            latents=model.config.latent.rope_dim > 0,
        )
        block = TurbomindEngineConfig().cache_block_seq_len
        window16 = 0 if kv.recent_tokens < 0 else kv.sink_tokens + kv.recent_tokens + block
        if context <= window16:
            wanted = f"more than the {window16} tokens that this quality keeps in the window"
            raise refuse("context", context, wanted=wanted, flag="--context, --kv-quality")


def search(
    model: OpenModel, contexts: Sequence[Sequence[int]], *, options: SearchOptions
) -> SearchResult:
    """Measure every layer in every candidate format, choose a table and measure the table."""
    sizes = Sizes(model, options)
    candidates = _candidates(model, options)
    cheapest = min(candidates, key=lambda pair: sizes.bits(pair))
    room = sizes.room(cheapest)
    layers = range(model.config.num_layers)
    tables = {
        (pair, layer): {"default": "none", layer: str(pair)}
        for pair in candidates
        for layer in layers
    }
    configures = {
        f"layer {layer} {pair}": model.configure(options.config(table))
        for (pair, layer), table in tables.items()
    }
    configures |= {str(pair): model.configure(options.config(pair)) for pair in candidates}
    scores = evaluate(model, contexts, variants=configures)
    kl = {label: float(score.report()["kl_mean"]) for label, score in scores.items()}
    layer_kl = {pair: [kl[f"layer {layer} {pair}"] for layer in layers] for pair in candidates}
    choices = [
        [(NONE, sizes.extra(NONE, layer, over=cheapest), 0.0)]
        + [
            (pair, sizes.extra(pair, layer, over=cheapest), layer_kl[pair][layer])
            for pair in candidates
        ]
        for layer in layers
    ]
    table = best_table(choices, room)
    proposal = model.configure(options.config(_as_dict(table)))
    measured = float(
        evaluate(model, contexts, variants={_RESULT: proposal})[_RESULT].report()["kl_mean"]
    )
    uniform = {pair: Measured(sizes.bits(pair), kl[str(pair)]) for pair in candidates}
    # The sum over layers is only an estimate. A uniform candidate that measures better wins.
    for pair, found in uniform.items():
        if found.bits <= options.budget and found.kl_mean < measured:
            table, measured = (pair,) * len(table), found.kl_mean
    bits = sizes.bits(_as_dict(table))
    return SearchResult(
        table=table,
        bits=bits,
        kl_mean=measured,
        predicted_kl=_predicted(table, layer_kl),
        layer_kl=layer_kl,
        uniform=uniform,
        yaml=_as_yaml(
            table,
            f"{bits:.3f} bits per value at {options.at_tokens} tokens, KL {measured:.6f}, "
            f"measured with --kv-quality {options.cache.get('kv_quality') or 'not given'}",
        ),
    )


def _candidates(model: OpenModel, options: SearchOptions) -> list[FormatPair]:
    """Return the candidates as the device resolves them, without 16 bit and duplicates."""
    found: dict[FormatPair, None] = {}
    for name in options.formats:
        resolved = resolve_kv_options(
            options.config(parse_pair(name)),
            model.config.windows,
            k_bias=model.config.k_bias,
            latents=model.config.latent.rope_dim > 0,
        )
        found[resolved.layers[0]] = None
    found.pop(NONE, None)
    if not found:
        raise ValueError("--formats needs at least one format below 16 bit.")
    return list(found)


class Sizes:
    """Computes the size of one sequence of `at_tokens` tokens as the engine counts it."""

    def __init__(self, model: OpenModel, options: SearchOptions) -> None:
        from lmdeploy import _turbomind

        self._model = model
        self._options = options
        none = _turbomind.EngineConfig()
        none.kv_format = "none"
        none.session_len = options.at_tokens
        self._none_bytes = _turbomind.sequence_bytes(model.config, none, options.at_tokens)

    def bytes(self, table: FormatPair | dict[Any, str]) -> int:
        """Return the bytes of the sequence in whole blocks of all pools."""
        from lmdeploy import _turbomind

        engine_config = _turbomind.EngineConfig()
        engine_config.session_len = self._options.at_tokens
        self._model.configure(self._options.config(table))(engine_config)
        return _turbomind.sequence_bytes(self._model.config, engine_config, self._options.at_tokens)

    def bits(self, table: FormatPair | dict[Any, str]) -> float:
        """Return the bits per stored value. A 16-bit cache has 16."""
        return 16.0 * self.bytes(table) / self._none_bytes

    def room(self, cheapest: FormatPair) -> int:
        """Return the bytes that the budget leaves if all layers have the cheapest candidate."""
        budget = self._options.budget
        floor = self.bits(cheapest)
        if floor > budget:
            raise ValueError(
                f"budget is {budget:g} bits. It must be at least {floor:.3f}, the size of "
                f"{cheapest} at {self._options.at_tokens} tokens. Change --budget, --formats or "
                "--at-tokens."
            )
        return int(budget * self._none_bytes / 16.0) - self.bytes(cheapest)

    def extra(self, pair: FormatPair, layer: int, *, over: FormatPair) -> int:
        """Return the bytes that `pair` in one layer adds to `over` in all layers."""
        table = {"default": str(over), layer: str(pair)}
        return self.bytes(table) - self.bytes(over)


Choice = tuple[FormatPair, int, float]  # a format, its extra bytes, its KL


def best_table(choices: Sequence[Sequence[Choice]], room: int) -> tuple[FormatPair, ...]:
    """Return one format per layer with the lowest sum of KL whose bytes fit into `room`.

    Ties go to fewer bytes. The result is exact: for every sum of bytes, the algorithm keeps the
    best table unless a smaller table is at least as good.
    """
    ways: dict[int, tuple[float, tuple[FormatPair, ...]]] = {0: (0.0, ())}
    for layer in choices:
        longer: dict[int, tuple[float, tuple[FormatPair, ...]]] = {}
        for used, (kl, table) in ways.items():
            for pair, extra, more in layer:
                total, sum_kl = used + extra, kl + more
                if total <= room and (total not in longer or sum_kl < longer[total][0]):
                    longer[total] = (sum_kl, (*table, pair))
        ways, lowest_kl = {}, float("inf")
        for total in sorted(longer):
            if longer[total][0] < lowest_kl:
                lowest_kl = longer[total][0]
                ways[total] = longer[total]
    return min(ways.values(), key=lambda way: way[0])[1]


def _predicted(table: Sequence[FormatPair], layer_kl: dict[FormatPair, list[float]]) -> float:
    return sum(layer_kl[pair][layer] for layer, pair in enumerate(table) if pair != NONE)


def _as_dict(table: Sequence[FormatPair]) -> dict[Any, str]:
    """Return a `kv_cache_format`: the most frequent format as default, ranges for the others."""
    default = Counter(table).most_common(1)[0][0]
    entries: dict[Any, str] = {"default": str(default)}
    first = 0
    for layer in range(1, len(table) + 1):
        if layer == len(table) or table[layer] != table[first]:
            if table[first] != default:
                name: int | str = first if layer - 1 == first else f"{first}-{layer - 1}"
                entries[name] = str(table[first])
            first = layer
    return entries


def _as_yaml(table: Sequence[FormatPair], comment: str) -> str:
    import yaml

    entries = yaml.safe_dump(_as_dict(table), sort_keys=False)
    return f"# lmdeploy lite kv-search: {comment}\n{entries}"


def report_lines(result: SearchResult) -> list[str]:
    """Return the lines that the command prints before the table."""
    pairs = list(result.layer_kl)
    width = max(12, *(len(str(pair)) for pair in pairs))
    lines = ["KL with one layer in a format, all others in 16 bit:"]
    lines.append("layer " + " ".join(f"{pair!s:>{width}}" for pair in pairs) + "  chosen")
    for layer, chosen in enumerate(result.table):
        cells = " ".join(f"{result.layer_kl[pair][layer]:>{width}.6f}" for pair in pairs)
        lines.append(f"{layer:>5} {cells}  {chosen}")
    lines.append("all layers in one format:")
    for pair, found in result.uniform.items():
        lines.append(f"  {pair!s:<{width}} {found.bits:7.3f} bits  KL {found.kl_mean:.6f}")
    lines.append(
        f"proposed: {result.bits:.3f} bits per value, KL {result.kl_mean:.6f} "
        f"(sum over layers {result.predicted_kl:.6f})"
    )
    return lines
