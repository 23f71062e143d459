"""Tests of `lmdeploy lite kv-report`: the command on a tiny model, and its parts."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_families import FAMILY_MODELS
from tiny_latents import V2
from tiny_models import TinyModel, make_model, save_model

from lmdeploy.cli.main import main
from lmdeploy.lite.divergence import Score
from lmdeploy.lite.report import costs, data, page, run
from lmdeploy.lite.report.cells import KvVariant
from lmdeploy.lite.report.data import Measurements, ReportOptions
from lmdeploy.lite.report.run import check_length, numbers
from lmdeploy.lite.report.scores import score_rows, summary
from lmdeploy.lite.retrieval import KEYS, ask, make_prompt, recall_summary

DATA = Path(__file__).parents[1] / "data"
LABELS = ["none", "nvfp4", "nvfp4/best"]


class FixedEngine:
    """Returns logits that predict the next token of a prompt, except at chosen positions."""

    def __init__(self, wrong: set[int]) -> None:
        self._wrong = wrong

    def pieces(self, prompt: list[int]) -> Any:
        logits = np.zeros((len(prompt), 512), np.float32)
        for i, token in enumerate(prompt[1:]):
            logits[i, token if i not in self._wrong else 0] = 20.0
        yield logits[:100]
        yield logits[100:]


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def test_score_rows_equal_scores_of_the_evaluation() -> None:
    rng = np.random.default_rng(0)
    reference = (5 * rng.standard_normal((50, 300))).astype(np.float32)
    logits = (reference + 0.1 * rng.standard_normal((50, 300))).astype(np.float32)
    targets = rng.integers(0, 300, 50)
    plain = Score()
    plain.add(logits, reference, targets=targets)
    wanted, got = plain.report(), summary(score_rows(logits, reference, targets=targets))
    for name, value in wanted.items():
        assert got[name] == pytest.approx(value, rel=1e-5), name
    shifted = score_rows(reference + np.float32(3), reference, targets=targets)
    assert np.abs(shifted[:, 1]).max() < 1e-6


def test_make_prompt_inserts_and_asks_for_every_pair() -> None:
    prompt = make_prompt(letters, [46] * 4000, context=2000, pairs=20, seed=1)
    text = "".join(map(chr, prompt.ids))
    assert len(prompt.ids) <= 2000 and len(prompt.questions) == 20
    asked = min(question.start for question in prompt.questions) - 20
    for question in prompt.questions:
        value = text[question.start : question.start + question.tokens]
        key = text[: question.start].rpartition("\n")[2]
        line = f"{key}{value};"
        assert value.strip().isdigit() and key.split(" ")[0] in KEYS
        assert text.count(line) == 2 and text.index(line) < asked
    depths = sorted(question.depth for question in prompt.questions)
    assert depths[0] < 0.1 and depths[-1] > 0.9
    assert prompt != make_prompt(letters, [46] * 4000, context=2000, pairs=20, seed=2)


def test_recall_summary_counts_whole_values() -> None:
    prompt = make_prompt(letters, [46] * 4000, context=2000, pairs=20, seed=1)
    every = recall_summary(ask(FixedEngine(set()), prompt))  # type: ignore[arg-type]
    assert every["recall"] == 1.0 and every["questions"] == 20
    last_digits = {q.start + q.tokens - 2 for q in prompt.questions[:5]}
    some = recall_summary(ask(FixedEngine(last_digits), prompt))  # type: ignore[arg-type]
    assert some["recall"] == 0.75
    assert some["log_prob"] == pytest.approx(-5, abs=0.1)  # 20 nats for a quarter of them


def test_make_prompt_too_many_pairs_are_rejected() -> None:
    with pytest.raises(ValueError, match="fewer pairs"):
        make_prompt(letters, [46] * 4000, context=300, pairs=20, seed=1)


def test_saturated_heads_count_bins_beyond_the_limit() -> None:
    histogram = np.zeros((1, 2, 640), np.int64)

    def place(x: float) -> int:
        return (int(np.float32(x).view(np.int32)) >> 19) - ((127 - 20) << 4)

    for x in (1.0, 440.0, 450.0, 1000.0):
        histogram[0, :, place(x)] += 1
    histogram[0, 1, place(500.0)] += 3
    statistics = {"k_histogram": histogram, "v_histogram": np.zeros_like(histogram)}
    cell = KvVariant("fp8", lambda _: None)
    found = costs.saturated_heads(statistics, cell)
    assert found == {"k": [[2, 5]], "v": [[0, 0]]}  # 450 is in the same bin as 448
    assert costs.worst_head(found) == ("k", 0, 1, 5)
    assert page.saturated_cell(found) == "7 (5 in K of layer 0, head 1)"
    scales = (np.array([[1.0, 4.0]], np.float32), np.ones((1, 2), np.float32))
    found = costs.saturated_heads(statistics, replace(cell, scales=scales))
    assert found == {"k": [[2, 0]], "v": [[0, 0]]}
    assert costs.saturated_heads(statistics, KvVariant("int4", lambda _: None)) is None
    assert page.saturated_cell({"k": [[0]], "v": [[0]]}) == "0"
    assert page.saturated_cell(None) == page.NOTHING


def test_measurements_are_kept_and_other_facts_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "measured.json"
    assert Measurements(path, {"model": "a"}).get("x", lambda: 3) == 3
    assert Measurements(path, {"model": "a"}).get("x", lambda: 1 / 0) == 3
    with pytest.raises(ValueError, match="another model"):
        Measurements(path, {"model": "b"})
    path.write_text("[1]")
    with pytest.raises(ValueError, match="not a file of kv-report"):
        Measurements(path, {"model": "a"})


def test_measurements_store_facts_before_the_first_value(tmp_path: Path) -> None:
    Measurements(tmp_path / "measured.json", {"model": "a"})  # interrupted before the first value
    with pytest.raises(ValueError, match="another model"):
        Measurements(tmp_path / "measured.json", {"model": "b"})


def test_measurements_accept_a_later_calibration(tmp_path: Path) -> None:
    path = tmp_path / "measured.json"
    Measurements(path, {"model": "a"}).put({"x": 3})
    assert Measurements(path, {"model": "a", "calibration": "c"}).has("x")
    assert Measurements(path, {"model": "a"}).has("x")
    with pytest.raises(ValueError, match="another calibration"):
        Measurements(path, {"model": "a", "calibration": "d"})


def test_check_length_text_shorter_than_the_longest_context_is_rejected() -> None:
    check_length("x", 2048, longest=2048, max_tokens=9999)
    for tokens, max_tokens in ((2047, 9999), (9999, 2047)):
        with pytest.raises(ValueError, match=r"text x has 2047 usable tokens.*--contexts"):
            check_length("x", tokens, longest=2048, max_tokens=max_tokens)


def test_numbers_parses_the_values_of_a_flag() -> None:
    assert numbers("2048, 8192,2048", "--contexts") == (2048, 8192)
    for text in ("", "a", "1,-2", "1.5"):
        with pytest.raises(ValueError, match="--contexts"):
            numbers(text, "--contexts")


def uncalibrated(arguments: list[str], *flags: str) -> list[str]:
    """Return the command with further flags and without a calibration."""
    at = arguments.index("--calibration-text")
    rest = [*arguments[:at], *arguments[at + 2 :]]
    return [*rest[:-2], *flags, *rest[-2:]]


def changed(arguments: list[str], flag: str, value: str) -> list[str]:
    """Return the command with another value of a flag."""
    at = arguments.index(flag) + 1
    return [*arguments[:at], value, *arguments[at + 1 :]]


def test_kv_report_of_none_alone_is_written(
    arguments: list[str], recwarn: pytest.WarningsRecorder
) -> None:
    flags = ["--formats", "none", "--qualities", "raw", "--name", "none"]
    assert main(uncalibrated(arguments, *flags)) == 0
    assert (Path(arguments[-1]) / "none.png").exists() and not recwarn.list


def test_kv_report_without_matplotlib_writes_a_page_without_plot(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find_spec(name)
    )
    flags = ["--formats", "none", "--qualities", "raw", "--name", "plain"]
    assert main(uncalibrated(arguments, *flags)) == 0
    assert "pip install 'matplotlib" in caplog.text and len(caplog.records) == 1
    folder = Path(arguments[-1])
    assert (folder / "plain.json").exists() and not (folder / "plain.png").exists()
    assert ".png" not in (folder / "plain.md").read_text(encoding="utf-8")


def test_kv_report_default_qualities_include_best_with_a_calibration(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[str, ...]] = []

    def make_report(options: ReportOptions) -> None:
        seen.append(options.qualities)
        raise ValueError("enough")

    monkeypatch.setattr(run, "make_report", make_report)
    file = str(DATA / "zh.txt")
    command = ["lite", "kv-report", "m", "--text", file]
    for flags in ([], ["--kv-calibration", file], ["--calibration-text", file]):
        with pytest.raises(SystemExit):
            main([*command, *flags])
    assert seen == [("raw", "balanced")] + [("raw", "balanced", "best")] * 2
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main([*command[:-1], "no/such.txt", "--qualities", "best"])
    assert "text is 'no/such.txt'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"formats": ("fp3",)}, "--formats"),
        ({"qualities": ("good",)}, "--qualities"),
        ({"qualities": ("best",)}, "--kv-calibration, or --calibration-text"),
        ({"contexts": (8,)}, "--contexts"),
        ({"calibration": Path("c")}, "apply only to the quality best"),
        ({"calibration_text": Path("c")}, "apply only to the quality best"),
        ({"calibration": Path("c"), "calibration_text": Path("c")}, "cannot be combined"),
        ({"calibration": Path("no/c"), "qualities": ("best",)}, "existing file.*--kv-calibration"),
        ({"texts": (Path("a/x.txt"), Path("b/x.txt"))}, "same name"),
    ],
)
def test_report_options_invalid_values_are_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReportOptions("m", **({"texts": (Path("x.txt"),), "qualities": ("raw",)} | changes))


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("report")
    tiny = TinyModel("llama", "Llama", {"max_position_embeddings": 1024})
    model = save_model(make_model(tiny), folder / "model")
    texts = [str(DATA / "austen.txt"), str(DATA / "zh.txt")]
    text = folder / "calibration.txt"
    text.write_text((DATA / "austen.txt").read_text(encoding="utf-8")[:600], encoding="utf-8")
    flags = ["--formats", "nvfp4", "--qualities", "raw,best", "--contexts", "256"]
    flags += ["--max-tokens", "512", "--calibration-text", str(text), "--retrieval-prompts", "1"]
    return ["lite", "kv-report", str(model), "--text", *texts, *flags, "--output", str(folder)]


def test_kv_report_writes_page_data_and_plot(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(arguments) == 0
    folder = Path(arguments[-1])
    text = (folder / "kv-report.md").read_text(encoding="utf-8")
    facts = json.loads((folder / "kv-report.json").read_text(encoding="utf-8"))
    assert (folder / "kv-report.png").read_bytes().startswith(b"\x89PNG")
    assert list(facts["cells"]) == LABELS
    assert all(f"| `{label}` |" in text for label in LABELS)
    assert str(folder) not in text
    for row in facts["cells"].values():
        assert row["texts"]["austen"]["256"]["tokens"] == 510
        assert row["write_ns_per_token"] > 0 and row["decode"]["256"]["tokens_per_s"] > 0
    divergence = [facts["cells"][label]["texts"]["zh"]["256"]["kl_mean"] for label in LABELS]
    assert divergence[0] == 0 and divergence[1] > divergence[2] > 0
    bits = [facts["cells"][label]["bits_per_value"]["8192"] for label in LABELS]
    assert bits[0] == 16 and bits[1] == 4.5 and 4.5 < bits[2] < 4.8

    # The second run measures nothing and writes the same page.
    monkeypatch.setattr(costs, "decode_speeds", lambda *a, **k: pytest.fail("measured again"))
    monkeypatch.setattr(data, "PromptEngine", lambda *a, **k: pytest.fail("measured again"))
    assert main(arguments) == 0
    assert (folder / "kv-report.md").read_text(encoding="utf-8") == text


GEMMA4 = next(tiny for tiny in FAMILY_MODELS if tiny.name == "gemma4")


@pytest.mark.parametrize("tiny", [V2, GEMMA4], ids=lambda tiny: tiny.name)
def test_kv_report_of_a_model_without_statistics_leaves_them_out(
    tiny: TinyModel, tmp_path: Path
) -> None:
    path = str(save_model(make_model(tiny), tmp_path / "model"))
    flags = ["--formats", "nvfp4", "--contexts", "256", "--max-tokens", "300"]
    flags += ["--retrieval-prompts", "1", "--output", str(tmp_path)]
    assert main(["lite", "kv-report", path, "--text", str(DATA / "austen.txt"), *flags]) == 0
    facts = json.loads((tmp_path / "kv-report.json").read_text(encoding="utf-8"))
    for label in ("nvfp4", "nvfp4/balanced"):
        assert facts["cells"][label]["texts"]["austen"]["256"]["kl_mean"] > 0
        assert facts["cells"][label]["saturated"] is None


def test_kv_report_context_beyond_training_positions_is_rejected(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(changed(arguments, "--contexts", "256,2048"))
    wanted = "is 2048. It must be at most the 1024 positions the model was trained for"
    assert wanted in capsys.readouterr().err


def test_choose_contexts_default_stays_within_training_positions() -> None:
    lengths = {1024: (1024,), 2048: (2048,), 8191: (2048,), 8192: (2048, 8192)}
    for longest, contexts in lengths.items():
        assert run.choose_contexts((), longest=longest) == contexts


def test_kv_report_missing_calibration_text_is_rejected(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(changed(arguments, "--calibration-text", "no/such.txt"))
    error = capsys.readouterr().err
    assert "'no/such.txt'. It must be an existing file" in error and "--calibration-text" in error
