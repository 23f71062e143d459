"""scripts/eval_gpt_oss.py: the whole path with a stand-in harness, and with lm-eval."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import eval_gpt_oss
import httpx
import jinja2
import pytest
import yaml
from eval import divergence, harness, policies, results, tasks
from server_process import Server, serving

SERVER = ["--", "--session-len", "512", "--num-threads", "1", "--cache-max-entry-count", "64"]


def grade(settings: dict[str, Any], question: dict[str, Any], text: str) -> bool:
    """Grade as lm-eval does with our task files: one regular expression, then an exact match."""
    settings = tasks.COMMON | settings
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
    """Asks one question after the other; `before` is called with each job."""

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
                "model": harness.MODEL_NAME,
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


def test_summary_of_counts_lost_and_gained_answers() -> None:
    def run(correct: list[bool]) -> results.RunResult:
        counters = {"first_token_seconds": 1.0, "first_tokens": 4, "truncated": 1}
        counters |= {"per_token_seconds": 1.0, "per_tokens": 4}
        return results.RunResult(correct, counters, 3 << 20, 1.0)

    plan: policies.Plan = {"stored": "nvfp4 balanced", "kv_bytes_per_token": 6480.5}
    plan["kv_window16_bytes_per_sequence"] = 4096
    rows = {
        "0": results.row_of(plan, {"tiny": [run([True, True, False, False])]}),
        "4": results.row_of(plan, {"tiny": [run([True, False, True, True])]}, failure="why\n  how"),
    }
    facts = {"model": "m", "harness": "h", "tasks": {"tiny": "0"}, "limit": None}
    summary = results.summary_of(rows, {**facts, "seeds": [1], "num_prompts": 2})
    four = summary["policies"]["4"]["tasks"]["tiny"]
    assert (four["lost"], four["gained"], four["accuracy"]) == (1, 2, 0.75)
    assert (four["low"], four["high"]) == pytest.approx((0.300642, 0.954413), abs=1e-5)
    assert summary["policies"]["4"]["first_token_seconds"] == 0.25
    text = results.markdown(summary)
    assert "| 1 / 2 |" in text and "6,480.5 + 4,096 per sequence | 3 MiB" in text
    assert "Failed: `4`: why\n" in text


def test_read_task_rejects_unsafe_file(tmp_path: Path) -> None:
    path = tmp_path / "t.yaml"
    for text in ("task: !function os.system\n", "task: t\nmetadata: {file: a}\n", "- task\n"):
        path.write_text(text)
        with pytest.raises(tasks.TaskError, match="not plain YAML with task and metadata"):
            tasks.read_task(str(path), None)


@pytest.mark.parametrize("line", ["{", '{"question": "Q"}', "[" * 100_000])
def test_read_task_rejects_bad_data(line: str, tmp_path: Path) -> None:
    with pytest.raises(tasks.TaskError, match=r"gsm8k\.jsonl does not exist.*grade-school-math"):
        tasks.read_task("gsm8k", tmp_path)
    good = '{"question": "Q", "answer": "#### 3"}'
    (tmp_path / "gsm8k.jsonl").write_text(f"{good}\n{line}\n")
    with pytest.raises(tasks.TaskError, match=r"gsm8k\.jsonl:2 is not a JSON object"):
        tasks.read_task("gsm8k", tmp_path)


@pytest.mark.parametrize(
    ("task", "question", "right", "wrong"),
    [
        ("aime25", {"answer": "70"}, "Answer: 7, no.\n**Answer: 70**", "Answer: 700"),
        ("aime25", {"answer": 70}, r"so \boxed{070}.", "70"),
        ("gpqa_diamond", {"answer": "C"}, "Answer: **C**", "Answer: Cold"),
        ("gpqa_diamond", {"answer": "C"}, r"answer: $\boxed{\text{C}}$", "C"),
        ("gsm8k", {"answer": "x\n#### 1,234"}, "Answer: $1,234.", "Answer: 1,235"),
        ("gsm8k", {"answer": "x\n#### -5"}, "**Answer:** -5", "Answer: 5"),
        ("tiny", {"answer": "blue"}, "White? No, Blue.", "red"),
    ],
)
def test_task_filters_extract_the_answer(
    task: str, question: dict[str, Any], right: str, wrong: str
) -> None:
    settings = yaml.safe_load((tasks.FOLDER / f"{task}.yaml").read_text())
    assert grade(settings, question, right)
    assert not grade(settings, question, wrong)


@pytest.mark.parametrize("flag", ["--policies=fp3", "--"])
def test_eval_gpt_oss_rejects_wrong_policy_or_flag(flag: str, tmp_path: Path, capsys: Any) -> None:
    arguments = ["smollm2", "--output", str(tmp_path / "eval"), flag]
    arguments += ["--server-port=1"] if flag == "--" else []
    assert eval_gpt_oss.main(arguments, harness=StandIn()) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert flag.partition("=")[2] in line


def test_eval_gpt_oss_interrupted_run_is_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, prompts = tmp_path / "eval", tmp_path / "prompts.jsonl"
    texts = [text[:700] for text in divergence.read_prompts(tasks.FOLDER / "prompts.jsonl")[:2]]
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
    check_summary(summary)


def check_summary(summary: dict[str, Any]) -> None:
    none, nvfp4 = summary["policies"]["0"], summary["policies"]["nvfp4"]
    assert none["tasks"]["tiny"]["total"] == nvfp4["tasks"]["tiny"]["total"] == 3
    assert none["tasks"]["tiny"]["truncated"] + nvfp4["tasks"]["tiny"]["truncated"] > 0
    assert none["kv_bytes_per_token"] == 30 * 2 * 3 * 64 * 2
    assert 0 < nvfp4["kv_bytes_per_token"] < none["kv_bytes_per_token"] / 3
    assert nvfp4["kv_window16_bytes_per_sequence"] > 0 == none["kv_window16_bytes_per_sequence"]
    assert nvfp4["divergence"]["kl_mean"] > 0 and nvfp4["divergence"]["tokens"] > 100
    for row in (none, nvfp4):
        assert row["per_token_seconds"] > 0 and row["first_token_seconds"] > 0
        assert 100 << 20 < row["peak_memory_bytes"] < 2 << 30
    assert none["divergence"]["kl_mean"] == 0 and none["divergence"]["top1"] == 1


def test_eval_gpt_oss_server_crash_fails_only_its_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output, servers = tmp_path / "eval", []

    @contextmanager
    def recorded(*arguments: Any, **options: Any) -> Iterator[Server]:
        with serving(*arguments, **options) as server:
            servers.append(server)
            yield server

    def crash(job: harness.Job) -> None:
        if len(servers) == 1:
            servers[0].process.kill()
            servers[0].process.wait()

    monkeypatch.setattr(eval_gpt_oss, "serving", recorded)
    options = ["--policies", "8", "4", "--limit", "1", "--max-new-tokens", "4"]
    assert evaluate_tiny(output, StandIn(crash), *options, "--skip-divergence") == 1
    assert "policy 8 failed: the server has ended with signal 9" in capsys.readouterr().err
    table = json.loads(output.with_suffix(".json").read_text())["policies"]
    assert "signal 9" in table["8"]["failure"] and table["8"]["tasks"] == {}
    assert table["4"]["failure"] is None and table["4"]["tasks"]["tiny"]["total"] == 1
    again = StandIn()
    assert evaluate_tiny(output, again, *options, "--skip-divergence") == 0
    assert len(again.jobs) == 1


def test_eval_gpt_oss_lm_eval_agrees_with_the_stand_in(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed (the extra eval)")
    output = tmp_path / "eval"
    options = ["--policies", "4", "--limit", "6", "--skip-divergence"]
    assert evaluate_tiny(output, None, *options) == 0
    by_harness = json.loads(output.with_suffix(".json").read_text())["policies"]["4"]
    assert evaluate_tiny(tmp_path / "stand-in", StandIn(), *options, "--concurrency", "1") == 0
    by_stand_in = json.loads((tmp_path / "stand-in.json").read_text())["policies"]["4"]
    ours, theirs = by_stand_in["tasks"]["tiny"], by_harness["tasks"]["tiny"]
    assert ours["total"] == theirs["total"] == 6
    # Batches may turn a near tie; a different prompt or grading would turn most answers.
    assert abs(ours["correct"] - theirs["correct"]) <= 1 and theirs["correct"] > 0
