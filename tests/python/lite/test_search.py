"""Tests of `lmdeploy lite kv-search`: the choice is optimal, and the engine accepts the table."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from lmdeploy.cli.main import main
from lmdeploy.config.kv_format_options import FormatPair, parse_cache_format, parse_pair
from lmdeploy.lite import search as kv_search
from lmdeploy.lite.divergence import cache_variants
from lmdeploy.lite.search import (
    NONE,
    SearchOptions,
    _as_dict,
    _as_yaml,
    best_table,
    check_context,
    report_lines,
    search,
)

PAIRS = [parse_pair(text) for text in ("none", "nvfp4", "fp8", "int8", "k=fp8,v=nvfp4")]
layer_choices = st.lists(
    st.tuples(st.sampled_from(PAIRS), st.integers(0, 9), st.floats(0, 1, width=16)),
    min_size=1,
    max_size=4,
).map(lambda items: [(PAIRS[1], 0, 1.0), *items])


@settings(max_examples=300, deadline=None)
@given(st.lists(layer_choices, min_size=1, max_size=4), st.integers(0, 20))
def test_best_table_equals_exhaustive_search(choices, room):
    table = best_table(choices, room)
    fitting = [way for way in itertools.product(*choices) if sum(c[1] for c in way) <= room]
    best = min(sum(c[2] for c in way) for way in fitting)
    found = [way for way in fitting if tuple(c[0] for c in way) == table]
    assert min(sum(c[2] for c in way) for way in found) == pytest.approx(best)


@given(st.lists(st.sampled_from(PAIRS), min_size=1, max_size=40))
def test_as_yaml_round_trips_tables(pairs):
    text = _as_yaml(pairs, "why")
    table = yaml.safe_load(text)
    assert table == _as_dict(pairs) and text.startswith("# ")
    assert parse_cache_format(table).by_layer([0] * len(pairs)) == pairs


def test_cache_variants_combine_formats_and_qualities():
    variants = cache_variants(["none", "int8", "k=fp8,v=nvfp4"], ["raw", "balanced"])
    assert list(variants) == [
        "none",
        "int8",
        "int8/balanced",
        "k=fp8,v=nvfp4",
        "k=fp8,v=nvfp4/balanced",
    ]
    assert variants["int8/balanced"].kv_quality == "balanced"
    given = {"kv_rotation": False}
    variants = cache_variants(["nvfp4"], ["best"], calibration="f", ingredients=given)
    assert variants["nvfp4/best"].kv_calibration == "f"
    assert variants["nvfp4/best"].kv_rotation is False


def test_cache_variants_invalid_values_are_rejected():
    with pytest.raises(ValueError, match="--kv-calibration"):
        cache_variants(["nvfp4"], ["best"])
    with pytest.raises(ValueError, match="kv_quality is 'good'"):
        cache_variants(["nvfp4"], ["good"])
    with pytest.raises(ValueError, match="kv_cache_format is 'fp3'"):
        cache_variants(["fp3"], ["raw"])


LAYERS = 4
BYTES = {"none": 1600, "nvfp4": 450, "fp8": 800, "int8": 850, "k=fp8,v=nvfp4": 625}
BYTES["k=none,v=nvfp4"] = 1025
# Layer 2 is the most sensitive.
WEIGHTS = (1.0, 2.0, 9.0, 0.5)
KL = {"none": 0.0, "nvfp4": 0.1, "fp8": 0.02, "int8": 0.001, "k=fp8,v=nvfp4": 0.05}
KL["k=none,v=nvfp4"] = 0.04


def rows(config):
    return [str(pair) for pair in config.kv_table.by_layer([0] * LAYERS)]


@pytest.fixture
def fakes(monkeypatch):
    """Replace sizes and KL by additive ones; `surprise` adds KL to mixed tables."""
    state = SimpleNamespace(surprise=0.0)

    class Sizes(kv_search.Sizes):
        def __init__(self, model, options):
            self._options, self._none_bytes = options, LAYERS * BYTES["none"]

        def bytes(self, table):
            return sum(BYTES[name] for name in rows(self._options.config(table)))

    def evaluate(model, contexts, variants):
        def kl(config):
            names = rows(config)
            mixed = len(set(names)) > 1 and "none" not in names
            total = sum(w * KL[name] for w, name in zip(WEIGHTS, names, strict=True))
            return total + state.surprise * mixed

        return {
            label: SimpleNamespace(report=lambda c=config: {"kl_mean": kl(c)})
            for label, config in variants.items()
        }

    monkeypatch.setattr(kv_search, "Sizes", Sizes)
    monkeypatch.setattr(kv_search, "evaluate", evaluate)
    state.model = SimpleNamespace(
        config=SimpleNamespace(
            num_layers=LAYERS,
            windows=[0] * LAYERS,
            max_position=64,
            k_bias=False,
            latent=SimpleNamespace(rope_dim=0),
        ),
        configure=lambda config: config,
    )
    return state


def run(fakes, budget, **options):
    return search(fakes.model, [[1, 2]], options=SearchOptions(budget=budget, **options))


def test_search_gives_the_sensitive_layer_more_bits(fakes):
    result = run(fakes, 6.0)
    assert result.bits <= 6.0
    assert [str(pair) for pair in result.table][2] in ("fp8", "int8")
    assert str(result.table[3]) == "nvfp4"
    assert result.kl_mean == pytest.approx(result.predicted_kl)
    assert result.kl_mean < result.uniform[FormatPair("nvfp4", "nvfp4")].kl_mean
    assert parse_cache_format(yaml.safe_load(result.yaml)).by_layer([0] * LAYERS) == list(
        result.table
    )


def test_search_larger_budget_is_never_worse(fakes):
    found = [run(fakes, budget).kl_mean for budget in (4.5, 5, 5.5, 6, 7, 8, 9, 12, 16)]
    assert found == sorted(found, reverse=True) and found[-1] == 0
    assert run(fakes, 16).table == (NONE,) * LAYERS


def test_search_prefers_measured_to_predicted_divergence(fakes):
    fakes.surprise = 100.0
    result = run(fakes, 8.1)
    assert set(result.table) == {FormatPair("fp8", "fp8")}
    assert result.kl_mean == pytest.approx(sum(WEIGHTS) * KL["fp8"])


def test_search_budget_that_is_too_small_is_rejected(fakes):
    with pytest.raises(ValueError, match=r"budget is 4 bits. It must be at least 4.500.*--budget"):
        run(fakes, 4.0)


def test_search_candidates_are_deduplicated_and_checked(fakes):
    with pytest.raises(ValueError, match="--formats"):
        run(fakes, 8, formats=("none",))
    result = run(fakes, 8, formats=("fp4", "nvfp4", "none"))
    assert list(result.layer_kl) == [FormatPair("nvfp4", "nvfp4")]


def test_check_context_within_the_16_bit_window_is_rejected(fakes):
    balanced = SearchOptions(budget=8, formats=("fp8",), cache={"kv_quality": "balanced"})
    check_context(fakes.model, 193, options=balanced)
    with pytest.raises(
        ValueError, match=r"context is 192. It must be more than the 192.*--context"
    ):
        check_context(fakes.model, 192, options=balanced)
    raw = SearchOptions(budget=8, cache={"kv_quality": "raw"})
    check_context(fakes.model, 2, options=raw)


def test_kv_search_unusable_files_are_rejected(tmp_path, capsys):
    text = tmp_path / "text"
    text.write_bytes(b"caf\xe9")
    arguments = ["lite", "kv-search", "smollm2", "--text", str(text), "--budget", "8"]
    for flags, message in ((["--output", str(tmp_path / "x")], ".yaml"), ([], "is not UTF-8")):
        with pytest.raises(SystemExit) as info:
            main([*arguments, *flags])
        error = capsys.readouterr().err
        assert info.value.code == 2 and message in error and error.count("\n") == 1


def test_search_options_unknown_format_names_the_flag():
    with pytest.raises(ValueError, match=r"^formats is 'fp3'\. .* \(--formats\)\.$"):
        SearchOptions(budget=8, formats=("fp3",))


def test_search_yaml_comment_describes_the_settings(fakes):
    text = run(fakes, 6.0, cache={"kv_quality": "balanced"}).yaml
    assert "at 8192 tokens" in text and "--kv-quality balanced" in text.splitlines()[0]


def test_report_lines_list_every_layer(fakes):
    lines = report_lines(run(fakes, 6.0))
    assert sum(line.lstrip()[:1].isdigit() for line in lines) == LAYERS
    assert "proposed:" in lines[-1]
