"""Tests of scripts/eval_gpt_oss.py with a stand-in harness and with lm-eval."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import eval_gpt_oss
import httpx
import jinja2
import pytest
import yaml
from eval import divergence, harness, make_data, policies, results, server, tasks

from lmdeploy.lite.divergence import evaluate
from lmdeploy.lite.prompt_engine import open_model

ROOT = Path(__file__).resolve().parents[3]
SERVER = ["--", "--session-len", "512", "--num-threads", "1", "--cache-max-entry-count", "64"]
TABLE = ROOT / "benchmarks/results/eval_tiny_smollm2.json"


def grade(settings: dict[str, Any], question: dict[str, Any], text: str) -> bool:
    """Grade an answer as lm-eval does with our task files: one regex, then an exact match."""
    (steps,) = settings["filter_list"]
    pattern = steps["filter"][0]
    found = re.findall(pattern["regex_pattern"], text)
    answer = found[pattern["group_select"]] if found else "[invalid]"
    (metric,) = settings["metric_list"]
    target = jinja2.Template(settings["doc_to_target"]).render(question)
    for ignored in metric.get("regexes_to_ignore", []):
        answer, target = re.sub(ignored, "", answer), re.sub(ignored, "", target)
    if metric.get("ignore_case"):
        answer, target = answer.lower(), target.lower()
    return answer == target


class StandIn:
    """A harness that asks one question after the other and calls `before` with each job."""

    version = "stand-in 1"

    def __init__(self, before: Callable[[harness.Job], None] | None = None) -> None:
        self.before = before
        self.jobs: list[harness.Job] = []

    def run(self, job: harness.Job, watch: Callable[[], None]) -> list[bool]:
        self.jobs.append(job)
        if self.before:
            self.before(job)
        settings = yaml.safe_load(job.task.rendered(job.generation))
        lines = Path(settings["dataset_kwargs"]["data_files"]["test"]).read_text().splitlines()
        correct = []
        for line in lines[: job.num_samples]:
            watch()
            question = json.loads(line)
            prompt = jinja2.Template(settings["doc_to_text"]).render(question)
            body = {
                "model": server.MODEL_NAME,
                "messages": [{"role": "user", "content": prompt}],
                "max_tokens": settings["generation_kwargs"]["max_gen_toks"],
                "temperature": settings["generation_kwargs"]["temperature"],
            }
            reply = httpx.post(f"{job.url}/v1/chat/completions", json=body, timeout=60)
            text = reply.raise_for_status().json()["choices"][0]["message"]["content"]
            correct.append(grade(settings, question, text))
        return correct


def evaluate_tiny(output: Path, stand_in: Any, *options: str) -> int:
    own = ["smollm2", "--tasks", "tiny", "--output", str(output), *options]
    return eval_gpt_oss.main([*own, *SERVER], harness=stand_in)


@pytest.mark.parametrize(
    ("correct", "total", "low", "high"),
    [(8, 10, 0.4901625, 0.9433178), (0, 10, 0.0, 0.2775328), (10, 10, 0.7224672, 1.0)],
)
def test_wilson_equals_known_intervals(correct: int, total: int, low: float, high: float) -> None:
    assert results.wilson(correct, total) == pytest.approx((low, high), abs=1e-6)


def test_summary_of_counts_lost_and_gained_answers() -> None:
    def run(correct: list[bool]) -> results.RunResult:
        timing = server.Timing(1.0, 4)
        return results.RunResult(correct, timing, timing, 1, 3 << 20, 1.0)

    plan = policies.Plan("nvfp4 balanced", 6480.5, 4096)
    rows = {
        "0": results.row_of(plan, {"tiny": [run([True, True, False, False])]}),
        "4": results.row_of(plan, {"tiny": [run([True, False, True, True])]}),
        "8": results.row_of(plan, {"tiny": []}, failure="the server has ended\n  Traceback"),
    }
    facts = {"model": "m", "harness": "h", "tasks": {"tiny": "0"}, "limit": None}
    summary = results.summary_of(rows, {**facts, "seeds": [1], "num_prompts": 2})
    four = summary["policies"]["4"]["tasks"]["tiny"]
    assert (four["lost"], four["gained"], four["accuracy"]) == (1, 2, 0.75)
    assert summary["policies"]["4"]["first_token_seconds"] == 0.25
    text = results.markdown(summary)
    assert "| 1 / 2 |" in text and "6,480.5 + 4,096 per sequence | 3 MiB" in text
    assert "Failed: `8`: the server has ended\n" in text and "Traceback" not in text


def test_read_task_unknown_or_unsafe_file_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "t.yaml"
    with pytest.raises(tasks.TaskError, match=r"mmlu.*aime25.*tiny"):
        tasks.read_task("mmlu", None)
    for text, words in (
        ("task: !function os.system\n", "not plain YAML"),
        ("- 1\n", "must be a table"),
        ("task: t\nmetadata: {}\ndoc_to_text: a\n", "doc_to_target must be a str"),
        ("task: t\nmetadata: {}\ndoc_to_text: a\ndoc_to_target: b\n", r"metadata\.file must"),
    ):
        path.write_text(text)
        with pytest.raises(tasks.TaskError, match=words):
            tasks.read_task(str(path), None)


def test_published_table_equals_its_data() -> None:
    summary = json.loads(TABLE.read_text(encoding="utf-8"))
    assert TABLE.with_suffix(".md").read_text(encoding="utf-8") == results.markdown(summary)
    assert list(summary["policies"]) == ["0", "8", "4", "16", "nvfp4"]
    assert all(row["failure"] is None for row in summary["policies"].values())
    assert summary["harness"].startswith("lm-eval ")


@pytest.mark.parametrize("name", ["aime25", "gpqa_diamond", "gsm8k", "needle", "tiny"])
def test_read_task_missing_data_error_names_source_place_and_fields(
    name: str, tmp_path: Path
) -> None:
    assert name in tasks.known_tasks()
    settings = yaml.safe_load((tasks.FOLDER / f"{name}.yaml").read_text())
    copy = tmp_path / f"{name}.yaml"
    copy.write_text(yaml.safe_dump(settings))
    with pytest.raises(tasks.TaskError) as caught:
        tasks.read_task(str(copy), tmp_path / "data")
    needs = settings["metadata"]
    for word in (needs["source"], str(tmp_path / "data" / needs["file"]), *needs["fields"]):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", [":2", "not a JSON object"]),
        ('{"question": "Q"}', [":2", "answer"]),
        ('{"question": "Q", "answer": ""}', [":2", "empty field answer"]),
        ("[" * 100_000, [":2", "not a JSON object"]),
    ],
)
def test_read_task_malformed_data_names_line_and_field(
    line: str, words: list[str], tmp_path: Path
) -> None:
    good = '{"question": "Q", "answer": "#### 3"}'
    (tmp_path / "gsm8k.jsonl").write_text(f"{good}\n{line}\n")
    with pytest.raises(tasks.TaskError) as caught:
        tasks.read_task("gsm8k", tmp_path)
    assert all(word in str(caught.value) for word in [str(tmp_path), *words]), caught.value


@pytest.mark.parametrize(
    ("task", "question", "right", "wrong"),
    [
        ("aime25", {"answer": "70"}, "Answer: 7, no.\n**Answer: 70**", "Answer: 700"),
        ("aime25", {"answer": 70}, r"so \boxed{070}.", "70"),
        ("gpqa_diamond", {"answer": "C"}, "Answer: **C**", "Answer: Cold"),
        ("gpqa_diamond", {"answer": "C"}, r"answer: $\boxed{\text{C}}$", "C"),
        ("gsm8k", {"answer": "x\n#### 1,234"}, "Answer: $1,234.", "Answer: 1,235"),
        ("gsm8k", {"answer": "x\n#### -5"}, "**Answer:** -5", "Answer: 5"),
        ("needle", {"answer": "1234567"}, "It is 1234567.", "12345678"),
        ("tiny", {"answer": "blue"}, "White? No, Blue.", "red"),
    ],
)
def test_task_filters_extract_the_answer(
    task: str, question: dict[str, Any], right: str, wrong: str
) -> None:
    settings = yaml.safe_load((tasks.FOLDER / f"{task}.yaml").read_text())
    assert grade(settings, question, right)
    assert not grade(settings, question, wrong)


def test_rendered_task_contains_generation_settings(tmp_path: Path) -> None:
    task = tasks.read_task("tiny", None)
    settings = yaml.safe_load(task.rendered({"max_gen_toks": 7, "top_p": 0.5}))
    assert settings["task"] == "kv_tiny"
    assert settings["generation_kwargs"]["max_gen_toks"] == 7
    assert settings["generation_kwargs"]["temperature"] == 0
    assert Path(settings["dataset_kwargs"]["data_files"]["test"]).samefile(task.data)
    changed = tmp_path / "tiny.yaml"
    changed.write_bytes((tasks.FOLDER / "tiny.yaml").read_bytes() + b"\n")
    (tmp_path / "tiny.jsonl").write_bytes(task.data.read_bytes())
    assert tasks.read_task(str(changed), None).digest != task.digest


def test_make_policies_combine_formats_and_qualities() -> None:
    made = policies.make_policies(
        ["0", "none", "8", "16", "k=fp8,v=nvfp4"],
        [None, "raw"],
        server_flags=["--num-threads", "1"],
    )
    assert [p.label for p in made] == [
        *("0", "8", "8/raw", "16", "16/raw", "k=fp8,v=nvfp4", "k=fp8,v=nvfp4/raw")
    ]
    assert made[1].flags == ["--num-threads", "1", "--quant-policy", "8"]
    assert made[-1].flags[2:] == [*("--kv-cache-format", "k=fp8,v=nvfp4", "--kv-quality", "raw")]
    assert made[-1].config().num_threads == 1


@pytest.mark.parametrize("name", ["5", "fp3", "k=fp8", "missing.yaml"])
def test_eval_gpt_oss_unknown_policy_is_a_one_line_error(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate_tiny(tmp_path / "eval", StandIn(), "--policies", name) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert name in line


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--no-such-flag", "--no-such-flag"),
        ("--server-port=1", "--server-port"),
        ("--disable-metrics", "--disable-metrics"),
        ("--max-batch-size=0", "max_batch_size"),
    ],
)
def test_eval_gpt_oss_wrong_server_flag_is_a_one_line_error(
    flag: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["smollm2", "--output", str(tmp_path / "eval"), "--", flag]
    assert eval_gpt_oss.main(arguments, harness=StandIn()) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert words in line


def test_eval_gpt_oss_interrupted_run_is_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, prompts = tmp_path / "eval", tmp_path / "prompts.jsonl"
    texts = [text[:1500] for text in divergence.read_prompts(tasks.FOLDER / "prompts.jsonl")[:2]]
    texts[0] = texts[0][:700]  # so that the longest is not the first
    prompts.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    options = ["--policies", "0", "nvfp4", "--limit", "3", "--max-new-tokens", "8"]
    options += ["--prompts", str(prompts)]

    def interrupt(job: harness.Job) -> None:
        if len(first.jobs) == 2:
            raise KeyboardInterrupt

    first = StandIn(interrupt)
    assert evaluate_tiny(output, first, *options) == 130
    assert "resumes" in capsys.readouterr().err
    second = StandIn()
    assert evaluate_tiny(output, second, *options) == 0
    assert (len(first.jobs), len(second.jobs)) == (2, 1)
    third = StandIn()
    assert evaluate_tiny(output, third, *options) == 0
    assert third.jobs == []
    text = output.with_suffix(".md").read_text(encoding="utf-8")
    assert capsys.readouterr().out.endswith(text + "\n")
    summary = json.loads(output.with_suffix(".json").read_text(encoding="utf-8"))
    check_summary(summary, texts)
    fourth = StandIn()
    assert evaluate_tiny(output, fourth, *options, "--seeds", "1234", "5") == 0
    assert [job.seed for job in fourth.jobs] == [5, 5]


def check_summary(summary: dict[str, Any], texts: list[str]) -> None:
    none, nvfp4 = summary["policies"]["0"], summary["policies"]["nvfp4"]
    assert none["tasks"]["tiny"]["total"] == nvfp4["tasks"]["tiny"]["total"] == 3
    assert none["tasks"]["tiny"]["truncated"] + nvfp4["tasks"]["tiny"]["truncated"] > 0
    assert none["kv_bytes_per_token"] == 30 * 2 * 3 * 64 * 2
    assert 0 < nvfp4["kv_bytes_per_token"] < none["kv_bytes_per_token"] / 3
    assert nvfp4["kv_hot_bytes_per_sequence"] > 0 == none["kv_hot_bytes_per_sequence"]
    for row in (none, nvfp4):
        assert row["per_token_seconds"] > 0 and row["first_token_seconds"] > 0
        assert 100 << 20 < row["peak_memory_bytes"] < 2 << 30
    assert none["divergence"]["kl_mean"] == 0 and none["divergence"]["top1"] == 1
    # The library's own evaluation of the same prompts must agree.
    model = open_model("smollm2", threads=1)
    policy = policies.Policy("nvfp4", None, tuple(SERVER[1:]))
    contexts = [model.loaded.tokenizer.encode(text) for text in texts]
    variants = {"x": model.configure(policy.config())}
    score = evaluate(model, contexts, variants=variants)["x"].report()
    assert nvfp4["divergence"]["kl_mean"] == pytest.approx(score["kl_mean"], rel=1e-3)
    assert nvfp4["divergence"]["top1"] == pytest.approx(score["top1"])
    assert nvfp4["divergence"]["tokens"] == score["tokens"]


def test_eval_gpt_oss_server_crash_fails_only_its_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    processes: list[Any] = []
    ready = server.Server.wait_until_ready

    def wait(self: Any, timeout: float) -> None:
        processes.append(self._process)
        ready(self, timeout)

    def crash(job: harness.Job) -> None:
        if len(processes) == 1:
            processes[0].send_signal(signal.SIGKILL)
            processes[0].wait()

    monkeypatch.setattr(server.Server, "wait_until_ready", wait)
    output = tmp_path / "eval"
    options = ["--policies", "8", "4", "--limit", "1", "--max-new-tokens", "4"]
    assert evaluate_tiny(output, StandIn(crash), *options, "--skip-divergence") == 1
    error = capsys.readouterr().err
    assert "policy 8 failed: the server has ended with signal 9" in error
    assert "Serving evaluated at" in error  # from the server's log
    table = json.loads(output.with_suffix(".json").read_text())["policies"]
    assert "signal 9" in table["8"]["failure"] and table["8"]["tasks"] == {}
    assert table["4"]["failure"] is None and table["4"]["tasks"]["tiny"]["total"] == 1
    assert table["4"]["divergence"] is None
    again = StandIn()
    assert evaluate_tiny(output, again, *options, "--skip-divergence") == 0
    assert len(again.jobs) == 1


def test_serving_server_that_does_not_start_raises_server_failure(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for model, timeout, words in (
        ("no-such-model", 60, r"status 2[\s\S]*no-such-model"),
        ("smollm2", 0.01, r"not ready after 0\.01 s"),
    ):
        with (
            pytest.raises(server.ServerFailure, match=words),
            server.serving(model, [], log=log, timeout=timeout),
        ):
            pass


def test_eval_gpt_oss_lm_eval_agrees_with_the_stand_in(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed (the extra eval)")
    output = tmp_path / "eval"
    options = ["--policies", "4", "--limit", "6", "--skip-divergence"]
    own = ["smollm2", "--tasks", "tiny", "--output", str(output), *options]
    assert eval_gpt_oss.main([*own, *SERVER]) == 0
    by_harness = json.loads(output.with_suffix(".json").read_text())["policies"]["4"]
    assert evaluate_tiny(tmp_path / "stand-in", StandIn(), *options, "--concurrency", "1") == 0
    by_stand_in = json.loads((tmp_path / "stand-in.json").read_text())["policies"]["4"]
    ours, theirs = by_stand_in["tasks"]["tiny"], by_harness["tasks"]["tiny"]
    assert ours["total"] == theirs["total"] == 6
    # Batching may change a near tie. Another prompt or grading would change most answers.
    assert abs(ours["correct"] - theirs["correct"]) <= 1 and theirs["correct"] > 0


@pytest.fixture
def job(tmp_path: Path) -> Iterator[harness.Job]:
    log = tmp_path / "log"
    log.write_text("one\ntwo\n")
    task = tasks.read_task("tiny", None)
    yield harness.Job(task, "http://127.0.0.1:1", "chat", 3, 1, 1, {}, log)


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        (None, "0 sample files.*\n  one\n  two"),
        ([(0, 1), (1, 0)], "scored 2 of 3 questions"),
        ([(0, 1), (1, 0), (3, 1)], "scored 3 of 3 questions"),
        ([(0, 1), (1, 0), (2, None)], "is None, not 0 or 1"),
    ],
)
def test_read_scores_incomplete_scores_are_rejected(
    job: harness.Job, samples: list[tuple[int, Any]] | None, words: str, tmp_path: Path
) -> None:
    if samples is not None:
        text = "".join(json.dumps({"doc_id": i, "exact_match": s}) + "\n" for i, s in samples)
        (tmp_path / "samples_kv_tiny.jsonl").write_text(text)
    with pytest.raises(harness.HarnessFailure, match=words):
        harness.read_scores(tmp_path, job)


def test_make_data_needle_inserts_answers_at_even_depths(tmp_path: Path) -> None:
    text, output = tmp_path / "text.txt", tmp_path / "needle.jsonl"
    text.write_text("All work and no play. " * 300)
    command = ["needle", str(text), str(output), "--characters", "1000", "4000", "--count", "4"]
    assert make_data.main(command) == 0
    task = tasks.read_task("needle", tmp_path)
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert task.num_samples == len(lines) == 8
    for line, length in zip(lines, [1000] * 4 + [4000] * 4, strict=True):
        assert 0 < len(line["context"]) - length < 80
        assert line["context"].count(line["answer"]) == 1
    depths = [line["context"].index(line["answer"]) / len(line["context"]) for line in lines[4:]]
    assert depths == pytest.approx([0.125, 0.375, 0.625, 0.875], abs=0.03)
    assert make_data.main(command) == 2  # the file already exists
    assert make_data.main(["needle", str(text), str(tmp_path / "n"), "--characters", "9999"]) == 2


def test_make_data_gpqa_shuffles_choices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = tmp_path / "in.csv", tmp_path / "gpqa_diamond.jsonl"
    head = "Record ID," + ",".join(make_data.GPQA_COLUMNS)
    rows = [f'{i},"Why, {i}?",right {i},wrong a,wrong b,wrong c' for i in range(40)]
    source.write_text("\n".join([head, *rows]))
    assert make_data.main(["gpqa", str(source), str(output)]) == 0
    assert tasks.read_task("gpqa_diamond", tmp_path).num_samples == 40
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    for i, line in enumerate(lines):
        assert line["choices"]["ABCD".index(line["answer"])] == f"right {i}"
    assert {line["answer"] for line in lines} == set("ABCD")
    source.write_text("Question,Correct Answer\na,b\n")
    assert make_data.main(["gpqa", str(source), str(tmp_path / "x")]) == 2
    assert "Incorrect Answer 1" in capsys.readouterr().err
