"""The suite of targets: verdicts, the search for the peer's best, files, the server's clients."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import attention_alone
import bench_engine
import pytest
import server_load
import target_suite
from bench_server import fastest
from our_engine import Cell
from peer_search import predicted, ranking, search_lengths, seconds_of_requests
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


def test_search_follows_the_line_beyond_what_it_measured():
    points = {"512": 1 / (1 + 512 / 1000), "2048": 1 / (1 + 2048 / 1000)}
    assert predicted(points, 8192) == pytest.approx(1 / (1 + 8192 / 1000))
    assert predicted({"128": 5.0}, 128) == pytest.approx(5.0)
    assert predicted({"512": 1.0, "2048": 1.1}, 8192) == pytest.approx(1.1)  # noise, not a law
    speeds = {
        "flat": {"decode": {"512": 90.0, "2048": 80.0}},
        "steep": {"decode": {"512": 120.0, "2048": 85.0}},
        "dropped": {"decode": {"512": 200.0}},
        "refused": {"decode": {}},
    }
    assert ranking(speeds, "decode", context=2048) == ["steep", "flat"]
    assert ranking(speeds, "decode", context=8192) == ["flat", "steep"]


def test_search_is_short():
    assert search_lengths(Cell(8192, 1, 16)) == (256, 1024)
    assert search_lengths(Cell(2048, 1, 16)) == (256, 1024)
    assert search_lengths(Cell(128, 1, 64)) == (64, 128)
    assert search_lengths(Cell(1024, 32, 16)) == (64, 512)


def test_the_servers_setting_is_predicted_from_both_searches():
    alone = {"a": {"prefill": {"512": 100.0}}, "b": {"prefill": {"512": 200.0}}, "c": {}}
    together = {"a": {"decode": {"512": 64.0}}, "b": {"decode": {"512": 32.0}}}
    load = Load(clients=2, requests=1, prompt_tokens=512, answer_tokens=128)
    seconds = seconds_of_requests(alone, together, load=load)
    assert seconds == {"a": 2 * (5.12 + 2.0), "b": 2 * (2.56 + 4.0)}


def test_peer_settings():
    peer = pytest.importorskip("llama_cpp_peer", reason="llama-cpp-python is not installed")
    names = {setting.name for setting in peer.EVERY_SETTING}
    assert len(names) == len(peer.EVERY_SETTING) == 2 * len(peer.KV_TYPES) == 22
    assert {"q8_0 keys, f16 values", "nvfp4, flash attention", "f16"} <= names
    assert len(peer.SIXTEEN_BIT) == 4
    assert all(s.flash_attention or s.v in peer.FLOAT_TYPES for s in peer.EVERY_SETTING)


def test_file_continues(tmp_path):
    path = tmp_path / "targets.json"
    file = ResultsFile(path)
    file.about = {"cpu": "x"}
    whole = row_of(DECODE, runs([2.0] * 5, [1.0] * 5), model="m")
    file.add(whole)
    file.add(unmeasured(MEMORY, "no peer", model="m"))
    file.add(as_trial(row_of(BY_NAME["prefill-128"], runs([1.0] * 5, [1.0] * 5), model="m"), "x"))
    assert file.search("key", lambda: {"a": 1}) == {"a": 1}
    again = ResultsFile(path)
    assert again.about == {"cpu": "x"} and again.rows == file.rows
    assert again.search("key", lambda: pytest.fail("searched again")) == {"a": 1}
    assert again.measured("m", DECODE, repeats=5) == whole
    assert again.measured("other", DECODE, repeats=5) is None
    assert again.measured("m", DECODE, repeats=6) is None
    assert again.measured("m", MEMORY, repeats=5) is None
    assert again.measured("m", BY_NAME["prefill-128"], repeats=5) is None
    again.forget([DECODE], "m")
    assert again.measured("m", DECODE, repeats=5) is None


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


def test_attention_is_held_against_the_lower_limit():
    caches = {2: 1 << 20, 3: 32 << 20}
    levels = [(1 << 20, "l2"), (2 << 20, "l2"), (3 << 20, "l3"), (33 << 20, "memory")]
    for size, level in levels:
        assert attention_alone.level_of(size, threads=2, caches=caches) == level
    assert attention_alone.level_of(1, threads=2, caches={}) == "memory"
    ceilings: dict[str, Any] = {"read_bytes_per_s": {"l3": 50e9, "memory": 20e9}}
    ceilings |= {"int8_ops_per_s": 400e9, "fp32_ops_per_s": 100e9, "bf16_ops_per_s": None}
    limit, name = attention_alone.lower_limit(ceilings, "l3", operations_per_byte=4)
    assert (limit, name) == (50e9, "read bandwidth of l3")
    limit, name = attention_alone.lower_limit(ceilings, "l3", operations_per_byte=16)
    assert limit == 25e9 and name.startswith("int8 arithmetic")
    with pytest.raises(LookupError, match="l2"):
        attention_alone.lower_limit(ceilings, "l2", operations_per_byte=4)


def test_ceilings_of_the_build(monkeypatch):
    """As the compiled module has them: 0 stands for what is not there."""

    def measure(device: Any, seconds: float) -> Any:
        read = SimpleNamespace(bytes_per_s=14e9)
        rates = {"int8_ops_per_s": 1e12, "bf16_ops_per_s": 0.0, "fp32_ops_per_s": 2e11}
        return SimpleNamespace(memory=read, l3=SimpleNamespace(bytes_per_s=0.0), l2=read, **rates)

    module = attention_alone._turbomind
    monkeypatch.setattr(module, "measure_ceilings", measure, raising=False)
    ceilings = attention_alone.measure_ceilings(1)
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


def test_fastest_server():
    assert fastest({"f16": 1.0, "q8_0 keys, f16 values": 2.0}).k == "q8_0"
    with pytest.raises(RuntimeError, match="none"):
        fastest({})
    with pytest.raises(ValueError, match="nvfp4"):
        fastest({"nvfp4": 1.0})
