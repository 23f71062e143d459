"""scripts/eval_scores.py: cosines and overlaps of attention scores with quantized keys."""

import json
from pathlib import Path

import eval_scores
import numpy as np
import pytest
from reference.quality import rotate_rows
from tiny_models import TinyModel, make_model, save_model

TEXT = Path(__file__).parents[1] / "data" / "austen.txt"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    tiny = TinyModel("llama", "Llama", {"max_position_embeddings": 256})
    return str(save_model(make_model(tiny), tmp_path_factory.mktemp("llama")))


def test_scores_of_more_bits_are_closer(folder: str, tmp_path: Path) -> None:
    out = tmp_path / "scores.json"
    command = [folder, str(TEXT), "--tokens", "96", "--formats", "none,int8,nvfp4,mxfp4"]
    assert eval_scores.main([*command, "--json", str(out)]) == 0
    facts = json.loads(out.read_text())
    rows = facts["formats"]
    assert facts["tokens"] == 96 and len(rows) == 8
    for kind in ("raw", "rotated"):
        order = [rows[f"{name}/{kind}"] for name in ("none", "int8", "nvfp4", "mxfp4")]
        for figure in ("cosine_mean", "cosine_p1", "overlap"):
            values = [row[figure] for row in order]
            assert values == sorted(values, reverse=True), (kind, figure)
        assert order[0]["cosine_p1"] > 1 - 1e-6 and order[0]["overlap"] > 0.99
        assert order[1]["cosine_p1"] > 0.999
        assert 0.9 < order[-1]["cosine_mean"] < order[1]["cosine_mean"]


def test_agreement_equals_a_loop_over_queries() -> None:
    rng = np.random.default_rng(0)
    reference = rng.standard_normal((50, 50)).astype(np.float32)
    scores = (reference + 0.3 * rng.standard_normal((50, 50))).astype(np.float32)
    cosines, overlaps = [], []
    for i in range(eval_scores.FIRST_QUERY, 50):
        ours, theirs = scores[i, : i + 1], reference[i, : i + 1]
        cosines.append(ours @ theirs / np.linalg.norm(ours) / np.linalg.norm(theirs))
        best = [set(np.argsort(row)[-eval_scores.TOP :]) for row in (ours, theirs)]
        overlaps.append(len(best[0] & best[1]) / eval_scores.TOP)
    agreement = eval_scores.Agreement()
    agreement.add(scores, reference)
    assert agreement.report() == pytest.approx(
        {
            "cosine_mean": np.mean(cosines),
            "cosine_p1": np.percentile(cosines, 1),
            "overlap": np.mean(overlaps),
        },
        rel=1e-5,
    )


@pytest.mark.parametrize("head_dim", [64, 80, 96])
def test_rotation_equals_reference(head_dim: int) -> None:
    rows = np.random.default_rng(1).standard_normal((5, head_dim)).astype(np.float32)
    np.testing.assert_allclose(eval_scores.rotate(rows), rotate_rows(rows), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("flags", "message"),
    [(["--formats", "fp3"], "'fp3'"), (["--tokens", "32"], "32 tokens"), ([], "existing file")],
)
def test_eval_scores_invalid_input_is_a_one_line_error(
    folder: str, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = TEXT if flags else TEXT.with_name("none.txt")
    assert eval_scores.main([folder, str(text), *flags]) == 2
    (line,) = (x for x in capsys.readouterr().err.splitlines() if "eval_scores.py:" in x)
    assert message in line
