"""The suite of targets: verdicts, the search for the peer's best, files, the server's clients."""

from __future__ import annotations

import asyncio
import json
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attention_alone
import bench_engine
import ceilings
import profile_report
import pytest
import results_file
import server_load
import target_suite
from cells import Cell
from results_file import ResultsFile
from server_load import Load
from target_suite import alternate, format_row
from targets import BY_NAME, TARGETS, Runs, as_trial, row_of, unmeasured

# As the issue that set them has them: work, goal.
GOALS = {
    "decode-128-16bit": 1.2,
    "decode-2048-batch-1": 1.8,
    "decode-8192-batch-1": 3.5,
    "prefill-128": 3,
    "prefill-2048": 4,
    "prefill-8192": 6,
    "decode-128-batch-32": 5,
    "decode-1024-batch-32": 6,
    "server-requests": 4,
    "server-p99": 0.3,
    "decode-32768-own": 2,
    "attention-8192": 0.7,
    "attention-32768": 0.7,
    "memory": 1.0,
}
DECODE, MEMORY = BY_NAME["decode-2048-batch-1"], BY_NAME["memory"]


def runs(ours: list[float], peer: list[float], note: str = "") -> Runs:
    return Runs(ours, peer, "nvfp4", "f16", note)


def test_goals():
    assert {target.name: target.goal for target in TARGETS} == GOALS
    assert {t.name for t in TARGETS if t.better == "<="} == {"server-p99", "memory"}


def test_ratio_is_the_median_of_pairs_not_the_ratio_of_medians():
    row = row_of(DECODE, runs([10, 20, 90, 40, 50], [10, 5, 30, 40, 100]), model="m")
    assert row.ratio == 1.0  # of 1, 4, 3, 1, 0.5; the medians have 40 / 30
    assert (row.ratio_low, row.ratio_high, row.met, row.repeats) == (0.5, 4.0, False, 5)


def test_verdicts():
    assert row_of(DECODE, runs([1.8] * 5, [1.0] * 5), model="m").met is True
    assert row_of(DECODE, runs([1.79] * 5, [1.0] * 5), model="m").met is False
    assert row_of(MEMORY, runs([1.0] * 5, [1.0] * 5), model="m").met is True
    assert row_of(MEMORY, runs([1.01] * 5, [1.0] * 5), model="m").met is False
    assert "runs: only 2" in row_of(DECODE, runs([1.0] * 2, [1.0] * 2), model="m").note
    trial = as_trial(row_of(DECODE, runs([9.0] * 5, [1.0] * 5), model="m"), "context 64")
    assert trial.met is None and "context 64" in format_row(trial)


@pytest.mark.parametrize(
    ("ours", "peer"), [([], []), ([1.0], []), ([float("nan")], [1.0]), ([0.0], [1.0])]
)
def test_runs_that_are_no_figures(ours, peer):
    with pytest.raises(ValueError, match="decode-2048"):
        row_of(DECODE, runs(ours, peer), model="m")


def test_turns_alternate(monkeypatch):
    monkeypatch.setattr(target_suite, "REST_SECONDS", 0.0)
    order: list[str] = []

    def run(name: str) -> float:
        order.append(name)
        return float(len(order))

    ours, theirs = alternate(lambda: run("ours"), lambda: run("theirs"), repeats=3)
    assert order == ["theirs", "ours", "ours", "theirs", "theirs", "ours"]
    assert (ours, theirs) == ([2, 3, 6], [1, 4, 5])


def test_file_continues(tmp_path):
    path = tmp_path / "targets.json"
    file = ResultsFile(path, commit="abc")
    file.about = {"cpu": "x"}
    whole = row_of(DECODE, runs([2.0] * 5, [1.0] * 5), model="m")
    file.add(whole)
    whole = replace(whole, commit="abc", date=results_file.today())
    file.add(unmeasured(MEMORY, "no peer", model="m"))
    file.add(as_trial(row_of(BY_NAME["prefill-128"], runs([1.0] * 5, [1.0] * 5), model="m"), "x"))
    assert file.search("key", lambda: {"a": 1}) == {"a": 1}
    again = ResultsFile(path, commit="abc")
    assert again.about == {"cpu": "x"} and again.rows == file.rows
    assert again.search("key", lambda: pytest.fail("searched again")) == {"a": 1}
    assert again.measured("m", DECODE, repeats=5) == whole
    assert again.measured("other", DECODE, repeats=5) is None
    assert again.measured("m", DECODE, repeats=6) is None
    assert again.measured("m", MEMORY, repeats=5) is None
    assert again.measured("m", BY_NAME["prefill-128"], repeats=5) is None
    again.forget([DECODE], "m")
    assert again.measured("m", DECODE, repeats=5) is None


def test_rows_of_other_commits_are_named_and_measured_again(tmp_path, capsys):
    path = tmp_path / "targets.json"
    old = ResultsFile(path, commit="abc")
    old.add(row_of(DECODE, runs([2.0] * 5, [1.0] * 5), model="m"))
    file = ResultsFile(path, commit="def+")
    assert file.measured("m", DECODE, repeats=5) is None
    assert f"({old.rows[0].origin}; here def+): measured again" in capsys.readouterr().out
    kept = file.measured("m", DECODE, repeats=5, keep=True)
    assert kept and kept.origin == f"abc, {results_file.today()}"
    assert "kept" in capsys.readouterr().out
    assert bench_engine.parse_arguments(["--suite", "targets", "--keep"]).keep
    assert ResultsFile(path, commit="abc").measured("m", DECODE, repeats=5)
    assert capsys.readouterr().out == ""


def test_rows_from_before_commits_were_noted(tmp_path):
    path = tmp_path / "targets.json"
    file = ResultsFile(path, commit="abc")
    file.add(row_of(DECODE, runs([2.0] * 5, [1.0] * 5), model="m"))
    document = json.loads(path.read_text())
    for field in ("commit", "date"):
        document["rows"][0].pop(field)
    path.write_text(json.dumps(document))
    file = ResultsFile(path, commit="abc")
    assert [row.origin for row in file.rows] == ["not noted"]
    assert file.measured("m", DECODE, repeats=5) is None


def test_figures_are_not_lost_to_a_row_without_them(tmp_path):
    file = ResultsFile(tmp_path / "targets.json", commit="abc")
    whole = row_of(DECODE, runs([2.0] * 5, [1.0] * 5), model="m")
    file.add(whole)
    file.add(unmeasured(DECODE, "no peer", model="m"))
    file.add(as_trial(whole, "short"))
    assert [(row.repeats, row.trial) for row in file.rows] == [(5, False)]


def test_a_commit_says_when_sources_changed(tmp_path):
    def git(*words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        command = ["git", "-C", str(tmp_path), *who, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    assert results_file.commit_here(tmp_path) == "unknown"
    git("init", "-q")
    (tmp_path / "benchmarks/results").mkdir(parents=True)
    source, result = tmp_path / "a.cc", tmp_path / "benchmarks/results/targets.json"
    for file in (source, result):
        file.write_text("1")
    git("add", ".")
    git("commit", "-qm", "x")
    commit = git("rev-parse", "--short", "HEAD").strip()
    result.write_text("2")
    assert results_file.commit_here(tmp_path) == commit
    git("commit", "-qam", "results")
    assert results_file.commit_here(tmp_path) == commit
    (tmp_path / "new.cc").write_text("1")
    assert results_file.commit_here(tmp_path) == commit + "+"
    (tmp_path / "new.cc").unlink()
    source.write_text("2")
    assert results_file.commit_here(tmp_path) == commit + "+"


def test_rows_of_one_machine(tmp_path):
    file = ResultsFile(tmp_path / "targets.json")
    file.measured_on({"cpu": "x", "threads": 2, "load_average_at_start": 0.1})
    file.measured_on({"cpu": "x", "threads": 2, "load_average_at_start": 9.9})
    with pytest.raises(ValueError, match="threads 2, here it is 1"):
        file.measured_on({"cpu": "x", "threads": 1})


@pytest.mark.parametrize(
    "text", ["[", "[]", '{"rows": []}', '{"about":{},"searches":{},"rows":[1]}']
)
def test_foreign_results_are_refused(text, tmp_path):
    path = tmp_path / "targets.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"targets\.json"):
        ResultsFile(path)
    assert path.read_text() == text


def test_names_on_the_command_line(capsys):
    chosen = bench_engine.parse_arguments(["--suite", "targets", "--only", "memory,prefill-128"])
    assert [t.name for t in bench_engine.targets_of(chosen)] == ["prefill-128", "memory"]
    left = bench_engine.parse_arguments(["--suite", "targets", "--skip", "memory"])
    assert len(bench_engine.targets_of(left)) == len(TARGETS) - 1
    assert bench_engine.main(["--suite", "targets", "--only", "nonsense"]) == 2
    assert "nonsense" in capsys.readouterr().err


def machine(monkeypatch: Any, *, one_l3: int, every_l3: int, threads: int = 2) -> Any:
    """Ceilings: memory 20 GB/s, L3 50, L2 100; int8 800 GOP/s, FP32 100. L2 of 1 MiB each."""
    monkeypatch.setattr(ceilings, "cache_bytes", lambda: {3: one_l3})
    read = {
        name: SimpleNamespace(bytes_per_s=rate)
        for name, rate in (("memory", 20e9), ("l3", 50e9), ("l2", 100e9))
    }
    sizes = {"l2_bytes": 1 << 20, "l3_bytes": every_l3, "num_threads": threads}
    return SimpleNamespace(int8_ops_per_s=8e11, fp32_ops_per_s=1e11, **read, **sizes)


@pytest.mark.parametrize(
    ("threads", "mib", "level"),
    [
        *((2, 1, "L2"), (2, 2, "L2"), (2, 3, "L3"), (2, 64, "L3"), (2, 65, "memory")),
        *((1, 2, "L3"), (1, 32, "L3"), (1, 33, "memory"), (8, 128, "L3"), (8, 129, "memory")),
    ],
)
def test_a_thread_reaches_one_l3(monkeypatch, threads, mib, level):
    """Four of 32 MiB; attention and the profile agree."""
    here = machine(monkeypatch, one_l3=32 << 20, every_l3=128 << 20, threads=threads)
    assert ceilings.level_of(mib << 20, here) == level
    assert profile_report.read_level(mib << 20, here)[0] == level
    found = {"bytes": mib << 20, "operations": 1}
    assert attention_alone.limits_of(found, here, mode="nvfp4").level == level


def test_an_l3_too_small_to_be_measured_counts_as_memory(monkeypatch):
    here = machine(monkeypatch, one_l3=32 << 20, every_l3=32 << 20)
    here.l3 = SimpleNamespace(bytes_per_s=0.0)
    limits = attention_alone.limits_of({"bytes": 8 << 20, "operations": 1}, here, mode="nvfp4")
    assert (limits.level, limits.read) == ("memory", 20e9)
    assert profile_report.read_level(8 << 20, here) == ("memory", 20e9)


def test_attention_is_held_against_the_lower_limit(monkeypatch):
    here = machine(monkeypatch, one_l3=32 << 20, every_l3=32 << 20)
    few, many = ({"bytes": 3 << 20, "operations": per_byte * (3 << 20)} for per_byte in (4, 16))
    limits = attention_alone.limits_of(few, here, mode="nvfp4")
    assert limits.lower == (50e9, "read bandwidth of L3") and limits.multiply == 100e9
    # Each product has a factor of 16 bits: half of int8's rate.
    assert attention_alone.limits_of(many, here, mode="nvfp4").lower == (25e9, "int16 products")
    assert attention_alone.limits_of(many, here, mode="fp8").lower == (6.25e9, "fp32 products")
    here.memory.bytes_per_s = here.l3.bytes_per_s = 0.0
    with pytest.raises(LookupError, match="memory"):
        attention_alone.limits_of(few, here, mode="nvfp4")


def test_an_attention_row_names_its_limit(monkeypatch):
    here = machine(monkeypatch, one_l3=32 << 20, every_l3=32 << 20)
    monkeypatch.setattr(attention_alone, "ceilings_here", lambda threads: here)
    found = {"bytes": 3 << 20, "operations": 48 << 20, "seconds": [1e-3], "isa": "avx512"}
    monkeypatch.setattr(attention_alone, "run_bench", lambda *a, **k: found)
    rows = attention_alone.attention_runs(
        None, Cell(8192, 8, 1), mode="nvfp4", bench=Path("x"), threads=2, repeats=2
    )
    assert rows.peer == [25e9, 25e9] and rows.peer_setting == "int16 products"
    assert rows.ours_setting == "nvfp4, raw, 2 threads"
    assert "read bandwidth of L3 50 GB/s, int16 products 25 GB/s" in rows.note


def test_ceilings_of_the_build(monkeypatch):
    """As the compiled module has them: 0 stands for what is not there."""

    def measure(device: Any, seconds: float) -> Any:
        read = SimpleNamespace(bytes_per_s=14e9)
        rates = {"int8_ops_per_s": 1e12, "bf16_ops_per_s": 0.0, "fp32_ops_per_s": 2e11}
        sizes = {"l2_bytes": 1 << 20, "l3_bytes": 1 << 25, "num_threads": 2}
        return SimpleNamespace(
            memory=read, l3=SimpleNamespace(bytes_per_s=0.0), l2=read, **rates, **sizes
        )

    module = attention_alone._turbomind
    monkeypatch.setattr(module, "measure_ceilings", measure, raising=False)
    monkeypatch.setattr("ceilings.cache_bytes", lambda: {3: 1 << 23})
    ceilings = attention_alone.measure_ceilings(1)
    assert ceilings["level_bytes"] == {"l2": 2 << 20, "l3": 2 << 23}
    assert ceilings["read_bytes_per_s"] == {"memory": 14e9, "l3": None, "l2": 14e9}
    assert ceilings["bf16_ops_per_s"] is None and ceilings["int8_ops_per_s"] == 1e12
    monkeypatch.delattr(module, "measure_ceilings")
    with pytest.raises(LookupError, match="measure_ceilings"):
        attention_alone.measure_ceilings(1)


LOAD = Load(clients=2, requests=2, prompt_tokens=3, answer_tokens=4)
USAGE = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}


def stream(*events: Any) -> list[tuple[float, bytes]]:
    texts = [event if isinstance(event, str) else json.dumps(event) for event in events]
    return [(float(i), f"data: {text}\n".encode()) for i, text in enumerate(texts)]


def piece(text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text}]}


def test_pieces_of_an_answer():
    lines = stream(piece("a"), piece(""), piece("b"), piece("c"), USAGE, "[DONE]")
    answer = server_load.read_answer(-1.0, lines, load=LOAD)
    assert answer.pieces == [0.0, 2.0, 3.0] and answer.gaps == [2.0, 1.0]
    assert answer.time_to_first == 1.0 and answer.time_per_token == 1.0
    result = server_load.summarise([answer, replace(answer, pieces=[0.0, 5.0])], 10.0)
    assert result.requests_per_s == 0.2 and result.tokens_per_s == 0.8
    assert result.p50_token == 2.0 and result.pieces_per_token == 5 / 8


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([piece("a"), piece("b"), USAGE], "DONE"),
        ([piece("a"), piece("b"), "[DONE]"], "None prompt tokens"),
        ([piece("a"), USAGE, "[DONE]"], "1 pieces"),
        ([{"error": {"message": "full"}}, "[DONE]"], "full"),
    ],
)
def test_answers_that_do_not_count(events, words):
    with pytest.raises(RuntimeError, match=words):
        server_load.read_answer(0.0, stream(*events), load=LOAD)


def test_prompts_differ_and_repeat():
    load = Load(clients=4, requests=2, prompt_tokens=16, answer_tokens=1)
    first, again, other = load.prompts(1000, 1), load.prompts(1000, 1), load.prompts(1000, 2)
    assert first == again and len(first) == 8
    assert len({prompt[0] for prompt in first + other}) > 8
    assert all(len(prompt) == 16 and min(prompt) >= server_load.FIRST_WORD_ID for prompt in first)


def test_clients_talk_to_a_server():
    """Against a socket that speaks as little HTTP as the servers do."""
    active, most, bodies = 0, 0, []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal active, most
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.split(b"Content-Length: ")[1].split(b"\r\n")[0])
        bodies.append(json.loads(await reader.readexactly(length)))
        active += 1
        most = max(most, active)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _, line in stream(piece("a"), piece("b"), USAGE, "[DONE]"):
            writer.write(f"{len(line) + 1:x}\r\n".encode() + line + b"\n\r\n")
            await asyncio.sleep(0.005)
        active -= 1
        writer.write(b"0\r\n\r\n")
        writer.close()

    async def run() -> list[server_load.Answer]:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            sent = [LOAD.body(prompt, "m") for prompt in LOAD.prompts(1000, 0)]
            return await server_load._clients(port, sent, load=LOAD)

    answers = asyncio.run(run())
    assert len(answers) == 4 and most == 2
    assert all(len(answer.pieces) == 2 and answer.tokens == 4 for answer in answers)
    assert {tuple(b["prompt"]) for b in bodies} == {tuple(p) for p in LOAD.prompts(1000, 0)}
    assert all(b["ignore_eos"] and b["max_tokens"] == 4 for b in bodies)


def test_a_server_that_refuses():
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\nprompt too long\r\n")
        writer.close()

    async def run() -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            await server_load.send(port, b"{}", load=LOAD)

    with pytest.raises(RuntimeError, match=r"(?s)400 Bad Request.*prompt too long"):
        asyncio.run(run())
