"""scripts/eval_ppl.py: the JSON file, and one line for wrong input."""

import json
from pathlib import Path

import eval_ppl
import pytest

TEXT = Path(__file__).parents[1] / "data" / "austen.txt"


def test_eval_ppl_writes_figures_of_every_mode(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    options = ["--modes", "none,int8,mxfp4", "--context", "64", "--max-tokens", "64"]
    assert eval_ppl.main(["smollm2", str(TEXT), *options, "--json", str(out)]) == 0
    facts = json.loads(out.read_text())
    assert (facts["model"], facts["text"], facts["context"]) == ("smollm2", TEXT.name, 64)
    assert list(facts["modes"]) == ["none", "int8", "mxfp4"]
    assert facts["modes"]["none"]["kl_mean"] == 0 < facts["modes"]["int8"]["kl_mean"]
    assert all(row["tokens"] == 63 for row in facts["modes"].values())


@pytest.mark.parametrize("arguments", [["no-such-file.txt"], [str(TEXT), "--modes", "fp3"]])
def test_eval_ppl_invalid_input_is_a_one_line_error(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert eval_ppl.main(["smollm2", *arguments]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if "eval_ppl.py:" in line]
    assert len(lines) == 1
