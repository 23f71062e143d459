"""The search for llama.cpp's best setting, its memory, and what its process may load."""

from __future__ import annotations

import itertools
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench_server
import memory_probe
import peer_search
import pytest
import target_suite
from bench_server import ServerBench, fastest
from cells import Cell
from memory_probe import Peak
from peer_search import kept, predicted, ranking, run_search, search_lengths, seconds_of_requests
from results_file import ResultsFile
from server_load import Load
from target_suite import NotMeasured, SuiteOptions, TargetSuite
from targets import BY_NAME
from test_random_checkpoint import make

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


def test_search_follows_the_line_beyond_what_it_measured():
    points = {"512": 1 / (1 + 512 / 1000), "2048": 1 / (1 + 2048 / 1000)}
    assert predicted(points, 8192) == pytest.approx(1 / (1 + 8192 / 1000))
    assert predicted({"128": 5.0}, 128) == pytest.approx(5.0)
    assert predicted({"512": 1.0, "2048": 1.1}, 8192) == pytest.approx(1.1)  # noise, not a law
    speeds = {
        "flat": {"decode": {"512": 90.0, "2048": 80.0}},
        "steep": {"decode": {"512": 120.0, "2048": 85.0}},
        "dropped short": {"decode": {"512": 200.0}},
        "dropped long": {"decode": {"2048": 79.0}},  # the best at 8192, had it no slope
        "refused": {"decode": {}},
    }
    assert ranking(speeds, "decode", context=2048) == ["steep", "flat"]
    assert ranking(speeds, "decode", context=8192) == ["flat", "steep"]


def test_the_first_round_resembles_the_cell():
    assert search_lengths(Cell(8192, 1, 16)) == (1024, 256)
    assert search_lengths(Cell(2048, 1, 16)) == (1024, 256)
    assert search_lengths(Cell(1024, 1, 16)) == (256, 1024)
    assert search_lengths(Cell(128, 1, 64)) == (64, 128)
    assert search_lengths(Cell(1024, 32, 16)) == (512, 64)
    assert search_lengths(Cell(512, 32, 16)) == (64, 512)
    assert search_lengths(Cell(128, 32, 32)) == (64, 128)


def test_what_is_nearly_third_stays():
    speeds = {
        name: {"decode": {"64": speed}}
        for name, speed in (("a", 99.0), ("b", 98.0), ("c", 50.0), ("d", 40.0), ("e", 39.9))
    }
    assert kept(speeds, "decode", context=128) == ["a", "b", "c", "d"]
    assert kept(speeds, "prefill", context=128) == []
    del speeds["c"], speeds["d"], speeds["e"]
    assert kept(speeds, "decode", context=128) == ["a", "b"]


class FakePeer:
    """Settings that lose a tenth each; the first run of a context is cold, one of three odd."""

    def __init__(self) -> None:
        self.contexts: list[tuple[str, int, int]] = []

    @contextmanager
    def context(self, cell: Cell, setting: Any) -> Any:
        self.contexts.append((setting.name, cell.context, cell.steps))
        speed = 1000.0 * 0.9 ** int(setting.name[1:].split(",")[0])
        odd = [0.01 * speed, speed, 3 * speed, speed, 0.1 * speed]
        values = itertools.chain(odd, itertools.repeat(speed))
        warm: list[float] = []

        def run(steps: int | None = None) -> float:
            assert warm
            return next(values)

        yield SimpleNamespace(
            warm_up=lambda: warm.append(next(values)), fill=lambda: None, prefill=run, decode=run
        )


def test_a_search_is_warm_steady_and_keeps_what_is_near():
    @dataclass(frozen=True)
    class Setting:
        index: int
        micro_batch: int = 512

        @property
        def name(self) -> str:
            rows = "" if self.micro_batch == 512 else f", ubatch {self.micro_batch}"
            return f"s{self.index}{rows}"

    peer, settings = FakePeer(), [Setting(i) for i in range(9)]
    speeds = run_search(peer, Cell(2048, 32, 16), settings=settings)  # type: ignore[arg-type]
    assert {n: p["decode"]["512"] for n, p in speeds.items()} == {
        f"s{i}": pytest.approx(1000 * 0.9**i, abs=0.01) for i in range(9)
    }
    second = [name for name, context, _ in peer.contexts if context == 64]
    assert second == ["s0", "s1", "s2", "s3", "s4"]  # 0.9 ** 2 below the third: within a fifth
    alone = run_search(peer, Cell(8192, 1, 1), settings=settings)  # type: ignore[arg-type]
    assert set(alone["s0, ubatch 128"]["prefill"]) == {"256", "1024"}
    assert set(alone["s8"]["prefill"]) == {"1024"}


def test_long_runs_are_not_repeated(monkeypatch):
    seconds = iter([0.0, 0.4, 10.0, 12.0])
    monkeypatch.setattr(peer_search.time, "perf_counter", lambda: next(seconds))
    values = iter([5.0, 1.0, 3.0, 7.0])
    assert peer_search.steady(lambda: next(values)) == 3.0
    assert peer_search.steady(lambda: next(values)) == 7.0


LOAD = Load(clients=2, requests=1, prompt_tokens=512, answer_tokens=128)


def test_the_servers_setting_is_predicted_from_both_searches():
    alone = {
        "a": {"prefill": {"1024": 100.0}},
        "b": {"prefill": {"1024": 200.0}},
        "c": {"prefill": {"256": 900.0}},
        "d": {"prefill": {"1024": 200.0}},
        "e": {},
    }
    together = {
        "a": {"decode": {"64": 64.0, "512": 64.0}},
        "b": {"decode": {"512": 32.0}},
        "c": {"decode": {"512": 64.0}},
        "d": {"decode": {"64": 900.0}},  # not known at 512, where a and b are
    }
    seconds = seconds_of_requests(alone, together, load=LOAD)
    assert seconds == {"a": 2 * (5.12 + 2.0), "b": 2 * (2.56 + 4.0)}


def fake_server(monkeypatch: Any, speeds: dict[str, float]) -> list[tuple[str, Load]]:
    """llama-server's requests per second by setting; settings that it lacks do not start."""
    runs: list[tuple[str, Load]] = []
    names: list[str] = []

    @contextmanager
    def peer(bench: ServerBench, setting: Any) -> Any:
        if setting.name not in speeds:
            raise RuntimeError("refused")
        names.append(setting.name)
        yield 1

    def run(bench: ServerBench, port: int, seed: int, *, load: Load) -> Any:
        runs.append((names[-1], load))
        return SimpleNamespace(requests_per_s=speeds[names[-1]])

    monkeypatch.setattr(ServerBench, "peer", peer)
    monkeypatch.setattr(ServerBench, "run", run)
    return runs


def test_three_settings_run_the_whole_load(monkeypatch, tmp_path):
    decodes = {"f32": 90.0, "f16": 80.0, "bf16": 70.0, "q8_0 keys, f16 values": 60.0}
    alone = {name: {"prefill": {"1024": 100.0}} for name in decodes}
    together = {name: {"decode": {"512": speed}} for name, speed in decodes.items()}
    runs = fake_server(monkeypatch, {"f32": 0.5, "f16": 0.7, "q8_0 keys, f16 values": 9.0})
    suite = TargetSuite(
        SimpleNamespace(path="m.gguf"),  # type: ignore[arg-type]
        SimpleNamespace(),  # type: ignore[arg-type]
        options=SuiteOptions(threads=1, repeats=1),
        file=ResultsFile(tmp_path / "targets.json", commit="abc"),
    )
    found = {1: alone, 32: together}
    monkeypatch.setattr(suite, "_search", lambda cell, peers: found[cell.batch])
    bench = ServerBench("m.gguf", 1000, LOAD, Path("llama-server"), threads=1)
    assert suite._server_setting(bench).name == "f16"  # bf16 does not start
    whole = [name for name, load in runs if load == LOAD]
    assert whole == ["f32", "f16"] and len(runs) == 4
    assert suite._server_setting(bench).name == "f16" and len(runs) == 4  # from the file


def test_the_servers_own_search_warms_up(monkeypatch):
    runs = fake_server(monkeypatch, {"f16": 0.7, "f32": 0.5})
    bench = ServerBench("m.gguf", 1000, LOAD, Path("llama-server"), threads=1)
    assert bench_server.search(bench) == {"f16": 0.7, "f32": 0.5}
    assert [load.prompt_tokens for _, load in runs] == [8, 128, 8, 128]


def test_peer_settings():
    peer = pytest.importorskip("llama_cpp_peer", reason="llama-cpp-python is not installed")
    names = {setting.name for setting in peer.EVERY_SETTING}
    assert len(names) == len(peer.EVERY_SETTING) == 2 * len(peer.KV_TYPES) == 22
    assert {"q8_0 keys, f16 values", "nvfp4, flash attention", "f16"} <= names
    assert len(peer.SIXTEEN_BIT) == 4
    assert all(s.flash_attention or s.v in peer.FLOAT_TYPES for s in peer.EVERY_SETTING)


def test_another_load_is_no_target():
    target = BY_NAME["server-requests"]
    assert bench_server.not_the_target(target, Load(16, 1, 512, 128)) is None
    assert bench_server.not_the_target(target, Load(16, 3, 512, 128)) is None
    for load in (Load(2, 1, 512, 128), Load(16, 1, 32, 128), Load(16, 1, 512, 8)):
        assert bench_server.not_the_target(target, load)


def test_a_setting_that_the_server_lacks_is_one_rows_fault():
    options = SuiteOptions(threads=2, repeats=1, peer_setting="mxfp4, flash attention")
    loaded = SimpleNamespace(path="m.gguf", config=None, weights=None)
    suite = TargetSuite(loaded, None, options=options, file=ResultsFile(None))  # type: ignore[arg-type]
    with pytest.raises(NotMeasured, match="mxfp4"):
        suite._server_setting(None)  # type: ignore[arg-type]


def test_fastest_server():
    assert fastest({"f16": 1.0, "q8_0 keys, f16 values": 2.0}).k == "q8_0"
    with pytest.raises(RuntimeError, match="none"):
        fastest({})
    with pytest.raises(ValueError, match="nvfp4"):
        fastest({"nvfp4": 1.0})


# --- Memory


@pytest.mark.parametrize("flag", ["on", "off"])
def test_the_peers_process_has_nothing_of_ours(flag):
    """With a llama_cpp that does nothing, as where it is not installed."""
    code = f"""
import sys
from unittest.mock import MagicMock
sys.path.insert(0, {str(BENCHMARKS)!r})
fake = sys.modules["llama_cpp"] = MagicMock()
fake.llama_vocab_n_tokens.return_value, fake.llama_decode.return_value = 1000, 0
import memory_probe
from cells import Cell
memory_probe.run_peer("x", Cell(8, 1, 1), setting="q4_0,{flag},as-stored", threads=1)
ours = ("lmdeploy", "_turbomind", "our_engine")  # an editable install has a finder in every process
print(sorted(n for n in sys.modules if n.split(".")[0] in ours))
memory_probe.check_alone("peer")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_our_process_has_nothing_of_theirs(tmp_path):
    """Runs the probe on a tiny file."""
    path = make("llama-3.2-1b", tmp_path / "tiny.gguf", "--format", "gguf")
    peak = memory_probe.probe(
        str(path), Cell(64, 1, 2), engine="ours", setting="nvfp4", threads=1
    )  # check_alone has run there
    assert peak.peak_rss_bytes > 1 << 20 and peak.setting.startswith("nvfp4, balanced")


def test_a_process_with_both_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "llama_cpp", SimpleNamespace())
    with pytest.raises(RuntimeError, match="memory of ours: llama_cpp is loaded"):
        memory_probe.check_alone("ours")
    with pytest.raises(RuntimeError, match="memory of peer: lmdeploy is loaded"):
        memory_probe.check_alone("peer")


def test_memory_is_held_against_the_least(monkeypatch, tmp_path):
    """Whether or not it is their fast setting; that one is in the note."""
    mib = {"q4_0,on,as-stored": 80, "q4_0,on,mmap": 200, "q4_0,on,read": 190}

    def probe(path: str, cell: Cell, *, engine: str, setting: str, threads: int) -> Peak:
        if engine == "ours":
            return Peak(95 << 20, "nvfp4, balanced (x)")
        return Peak(mib.get(setting, 300) << 20, f"[{setting}]")

    monkeypatch.setattr(target_suite, "probe", probe)
    monkeypatch.setattr(target_suite, "REST_SECONDS", 0.0)
    suite = TargetSuite(
        SimpleNamespace(path="m.gguf"),  # type: ignore[arg-type]
        SimpleNamespace(),  # type: ignore[arg-type]
        options=SuiteOptions(threads=1, repeats=5),
        file=ResultsFile(None, commit="abc"),
    )
    rows: list[Any] = []
    suite.run([BY_NAME["memory"]], report=rows.append)
    (row,) = rows
    assert (row.peer, row.met) == (80 << 20, False)
    assert row.peer_setting == "[q4_0,on,as-stored]" and row.ours_setting == "nvfp4, balanced (x)"
    assert "repacked for speed ([q4_0,on,read]): 0.500" in row.note
    assert {"q4_0,on,as-stored", "mxfp4,on,as-stored"} <= set(target_suite.AS_STORED_SETTINGS)
