"""scripts/eval_long.py: divergence by position, and needles by depth, with extended RoPE too."""

import json
from pathlib import Path

import eval_long
import numpy as np
import pytest
from tiny_models import TinyModel, make_model, save_model

from lmdeploy.lite.divergence import Score
from lmdeploy.lite.report.scores import reference_scores, score_rows

TEXT = Path(__file__).parents[1] / "data" / "austen.txt"
POSITIONS = 512  # that the model was trained for


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    tiny = TinyModel("llama", "Llama", {"max_position_embeddings": POSITIONS})
    return str(save_model(make_model(tiny), tmp_path_factory.mktemp("llama")))


def test_eval_long_writes_divergence_by_position_and_needles(
    folder: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(eval_long, "FIRST_RANGE", 256)
    out = tmp_path / "long.json"
    flags = ["--contexts", "512,1024", "--rope-scaling-factor", "1", "--formats", "none,nvfp4"]
    command = [folder, str(TEXT), *flags, "--kv-quality", "raw,balanced", "--json", str(out)]
    assert eval_long.main(command) == 0
    facts = json.loads(out.read_text())
    assert facts["rope_scaling_factor"] == 1 and list(facts["contexts"]) == ["512", "1024"]
    long = facts["contexts"]["1024"]
    ranges = ["0-256", "256-512", "512-1023"]
    assert list(long["divergence"]) == ["none", "nvfp4", "nvfp4/balanced"]
    assert all(list(rows) == ranges for rows in long["divergence"].values())
    for positions in ranges:
        rows = {label: row[positions] for label, row in long["divergence"].items()}
        assert rows["none"]["kl_max"] == 0 and rows["none"]["ppl_ratio"] == 1
        assert rows["nvfp4"]["kl_mean"] > rows["nvfp4/balanced"]["kl_mean"] > 0
        assert rows["nvfp4"]["kl_max"] >= rows["nvfp4"]["kl_p99"] >= rows["nvfp4"]["kl_p50"]
    assert long["divergence"]["nvfp4"]["512-1023"]["tokens"] == 511
    assert set(long["needles"]) == set(long["divergence"])
    assert all(row["questions"] == 16 for row in long["needles"].values())
    page = capsys.readouterr().out
    assert "## Context 1,024" in page and "| `nvfp4/balanced` | 512-1023 |" in page


def test_table_of_equals_scores_of_the_evaluation() -> None:
    rng = np.random.default_rng(0)
    reference = (3 * rng.standard_normal((60, 200))).astype(np.float32)
    logits = (reference + 0.2 * rng.standard_normal((60, 200))).astype(np.float32)
    ids = rng.integers(0, 200, 61)
    wanted = Score()
    wanted.add(logits, reference, targets=ids[1:])
    baseline = reference_scores(reference, ids)
    found = eval_long.table_of(score_rows(logits, reference, targets=ids[1:]), baseline)
    for name, value in wanted.report().items():
        assert found[name] == pytest.approx(value, rel=1e-5), name

    def probability(rows: np.ndarray) -> np.ndarray:
        share = np.exp(rows.astype(np.float64))
        return share[np.arange(60), ids[1:]] / share.sum(axis=1)

    change = probability(logits) - probability(reference)
    assert found["dp_mean"] == pytest.approx(change.mean(), rel=1e-4)
    assert found["dp_rms"] == pytest.approx(np.sqrt((change**2).mean()), rel=1e-4)


def test_ranges_double_and_end_with_the_context() -> None:
    assert list(eval_long.ranges(1000)) == [(0, 1000)]
    assert list(eval_long.ranges(4095)) == [(0, 1024), (1024, 2048), (2048, 4095)]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--contexts", str(POSITIONS + 1)], "--rope-scaling-factor"),
        (["--contexts", "x"], "'x' is not a positive integer"),
        (["--contexts", "500000", "--rope-scaling-factor", "1"], "The text has"),
        (["--formats", "fp3"], "fp3"),
    ],
)
def test_eval_long_invalid_input_is_a_one_line_error(
    folder: str, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert eval_long.main([folder, str(TEXT), *flags]) == 2
    (line,) = (x for x in capsys.readouterr().err.splitlines() if "eval_long.py:" in x)
    assert message in line
