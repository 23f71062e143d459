"""The figures of a GPU, without one: files, targets, tables, and what peers are asked for.

Every figure here is made up. None of it is written outside a temporary folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gpu_plan
import gpu_results
import gpu_tables
import gpu_targets
import peers_gpu
import pytest
from gpu_fakes import ABOUT
from gpu_results import Row, merge_into, read_document, with_ratios
from reference.layout import row_bytes

import lmdeploy

ROOT = Path(__file__).resolve().parents[3]
COPY_US = 1000.0  # of 4 GB, read and written
ROOF = 4000.0  # GB/s

# What a made-up GPU takes beside 16 bit.
SPEED = {"none": 1.0, "int8": 1.9, "fp8": 1.9, "fp8_e5m2": 1.9}
SPEED |= {"int4": 3.3, "mxfp4": 3.4, "nvfp4": 3.4}


def copy_row() -> Row:
    return {
        "by": "ours",
        "op": "copy",
        "mode": "",
        "shape": {"mb": 4096},
        "us": COPY_US,
        "activation_bytes": 4_000_000_000,
    }


def decode_row(mode: str, us: float, *, by: str = "ours", **shape: int) -> Row:
    """KV of 16 bit: 600 MB; of the others accordingly."""
    full = gpu_plan.attention_shape(8, 32768) | shape
    values = full["batch"] * full["context"] * 2 * full["kv_heads"] * full["head_dim"]
    kv_bytes = round(values * gpu_tables.value_bytes(mode, full["head_dim"]))
    row = {"by": by, "op": "decode", "mode": mode, "shape": full, "us": us, "kv_bytes": kv_bytes}
    return row | ({"copy_gb_per_s": ROOF} if by == "ours" else {})


def verdict(rows: list[Row], name: str, mode: str = "nvfp4") -> gpu_targets.Verdict:
    (target,) = [t for t in gpu_targets.TARGETS if t.name == name]
    return gpu_targets.judge(target, mode, rows=with_ratios(rows))


def test_goals():
    assert {t.name: (t.better, t.goal) for t in gpu_targets.TARGETS} == {
        "decode-bandwidth": (">=", 0.85),
        "decode-16bit": (">=", 3.0),
        "decode-fp8": (">=", 1.6),
        "decode-8x32k": ("<=", 83.0),
        "decode-window": ("<=", 8.0),
        "prefill": ("<=", 1.05),
        "write": ("<=", 1.2),
        "write-served": ("<=", 1.2),
    }


def test_ratios_are_of_the_same_shape_and_engine():
    rows = [
        copy_row(),
        decode_row("none", 300.0),
        decode_row("nvfp4", 100.0),
        decode_row("none", 30.0, by="a peer"),
        decode_row("none", 10.0, batch=1),
        decode_row("nvfp4", 5.0, batch=1),
    ]
    found = with_ratios(rows)
    assert found[2]["vs_none"] == 3.0 and "vs_fp8" not in found[2]
    assert found[5]["vs_none"] == 2.0
    assert found[2]["gb_per_s"] == pytest.approx(rows[2]["kv_bytes"] / 1e5, rel=1e-3)
    assert found[2]["of_copy"] == pytest.approx(found[2]["gb_per_s"] / ROOF, rel=1e-3)
    assert "of_copy" not in found[3]  # a peer's run measured no copy
    again = with_ratios([row | {"copy_gb_per_s": None} for row in found])
    assert all("of_copy" not in row for row in again)  # nothing stale stays
    assert with_ratios([{**copy_row(), "us": None}]) == [{**copy_row(), "us": None}]


def test_the_roof_is_the_largest_copy():
    small = copy_row() | {"shape": {"mb": 1}, "us": 1.0, "activation_bytes": 1 << 21}
    for rows in ([copy_row(), small], [small, copy_row()]):
        assert gpu_results.copy_bandwidth(rows) == ROOF
    assert gpu_results.copy_bandwidth([decode_row("none", 1.0)]) is None


def test_runs_are_not_compared_with_one_another():
    first, second = ({"run": f"2026-12-0{day}T00:00:00Z"} for day in (1, 2))
    rows = [
        decode_row("none", 300.0) | first,
        decode_row("nvfp4", 100.0) | first,
        decode_row("nvfp4", 50.0, group=4) | second | {"copy_gb_per_s": 2000.0},
        decode_row("none", 400.0, group=4) | first,
        decode_row("none", 200.0, by="a peer") | second,
    ]
    found = with_ratios(rows)
    assert found[1]["vs_none"] == 3.0 and "vs_none" not in found[2]
    for row in found[1:3]:  # each beside the roof of its own run
        assert row["of_copy"] == pytest.approx(row["gb_per_s"] / row["copy_gb_per_s"], rel=1e-3)
    faster = verdict([copy_row(), *rows], "decode-16bit")
    assert (faster.value, faster.num_shapes) == (2.0, 1)  # the peer's, whenever it ran
    text = "\n".join(gpu_tables.run_lines(found))
    assert "2026-12-01T00:00:00Z (3 rows), 2026-12-02T00:00:00Z (2 rows)" in text
    assert not list(gpu_tables.run_lines(found[:2]))


def test_written_bytes_of_a_format_are_compared_with_plain_16_bit():
    shape = gpu_plan.attention_shape(1, 2048) | {"new_tokens": 2048}
    served = shape | {"search": 1, "rotate": 1}
    rows = [
        {"by": "ours", "op": "write", "mode": "none", "shape": shape, "us": 10.0},
        {"by": "ours", "op": "write", "mode": "nvfp4", "shape": shape, "us": 11.0},
        {"by": "ours", "op": "write", "mode": "nvfp4", "shape": served, "us": 20.0},
    ]
    assert verdict(rows, "write").value == pytest.approx(1.1)
    assert verdict(rows, "write").met is True
    assert verdict(rows, "write-served").value == pytest.approx(2.0)
    assert verdict(rows, "write-served").met is False


def test_the_worst_shape_and_the_best_peer_decide():
    rows = [copy_row()]
    for batch, fp4 in ((16, 300.0), (32, 700.0)):
        rows += [decode_row("none", 1200.0, batch=batch), decode_row("nvfp4", fp4, batch=batch)]
    found = verdict(rows, "decode-16bit")
    assert (found.value, found.num_shapes, found.met) == (pytest.approx(1200 / 700), 2, False)
    assert "batch 32" in found.shape and "MISSED" in str(found) and "batch 32" in str(found)
    rows = rows[:3]
    alone = verdict(rows, "decode-16bit")
    assert alone.value == pytest.approx(4.0) and alone.met is None and alone.with_peers == 0
    assert str(alone).startswith("no peer ") and "peers on 0 of 1 shapes" in str(alone)
    assert gpu_tables.verdict_cells(alone)[4] == "≥ 3, no peer measured"
    slow = decode_row("none", 1500.0, by="a peer", batch=16)
    beside = verdict([*rows, slow], "decode-16bit")
    assert beside.met is True and str(beside).startswith("met ")
    rows.append(decode_row("none", 600.0, by="a peer", batch=16))
    assert verdict(rows, "decode-16bit").value == pytest.approx(2.0)
    assert verdict(rows, "decode-16bit").met is False
    assert verdict(rows, "decode-fp8").value is None  # no fp8 was measured
    assert "not measured" in str(verdict(rows, "decode-fp8"))


def test_small_caches_are_none_of_the_bandwidth_targets():
    rows = [decode_row("nvfp4", 1e6, batch=1)]
    assert verdict(rows, "decode-bandwidth").value is None
    rows.append(decode_row("nvfp4", 100.0, batch=32))
    assert verdict(rows, "decode-bandwidth").num_shapes == 1


@pytest.mark.parametrize(
    ("us", "words"),
    [(70.0, "met, stretch|stretch 74 met"), (80.0, "stretch 74 missed"), (90.0, "MISSED")],
)
def test_a_layer_of_8_times_32k(us, words):
    text = str(verdict([decode_row("nvfp4", us)], "decode-8x32k"))
    assert any(word in text for word in words.split("|")), text


def synthetic_rows() -> list[Row]:
    """The whole plan, measured on a GPU that nobody has."""
    rows = []
    for cell in gpu_plan.kernel_cells():
        size = cell.shape.get("batch", 1) * cell.shape.get("context", 64)
        us = COPY_US if cell.op == "copy" else 1.0 + size * 1e-3 / SPEED.get(cell.mode, 1.0)
        found: dict[str, Any] = {"us": us, "us_low": us, "us_high": us, "copy_gb_per_s": ROOF}
        if cell.op == "copy":
            found["activation_bytes"] = 4_000_000_000
        elif cell.mode:
            values = size * 2 * cell.shape["kv_heads"] * cell.shape["head_dim"]
            per_value = gpu_tables.value_bytes(cell.mode, cell.shape["head_dim"])
            found["kv_bytes"] = round(values * per_value)
        else:
            found |= {"weight_bytes": 10_000_000, "operations": 20_000_000}
        rows.append(cell.row("ours", found))
    return rows


def test_the_plan_measures_every_target():
    cells = gpu_plan.kernel_cells()
    assert len({cell.line() for cell in cells}) == len(cells)
    assert cells[0].op == "copy"
    assert {cell.op for cell in gpu_plan.small_cells()} == {cell.op for cell in cells}
    missing = [v for v in gpu_targets.verdicts(with_ratios(synthetic_rows())) if v.value is None]
    assert not missing


def test_bytes_of_a_value_are_those_of_the_layout():
    for mode in gpu_tables.MODES:
        for dim in (64, 128):
            assert gpu_tables.value_bytes(mode, dim) * dim == row_bytes(mode, dim)
    for mode in ("none", "fp8", "nvfp4"):
        shape = gpu_plan.attention_shape(3, 100)
        assert peers_gpu.kv_bytes(mode, shape) == 3 * 100 * 2 * 8 * row_bytes(mode, 128)
    assert peers_gpu.kv_bytes("none", gpu_plan.window_shape(2)) == 2 * 128 * 2 * 8 * 64 * 2


def test_the_roof_is_the_formula():
    # 8 sequences of 32k: 8 * 32768 * 2 * 8 * 128 values, 0.5625 bytes each, at 4.3 TB/s.
    assert gpu_tables.least_us("nvfp4", 8, context=32768, gb_per_s=4300) == pytest.approx(
        70.2, rel=1e-2
    )
    assert gpu_tables.least_us("none", 1, context=8192, gb_per_s=4300) == pytest.approx(
        7.8, rel=1e-2
    )


def test_files_are_merged_by_key(tmp_path):
    path = tmp_path / gpu_results.file_name("Synthetic GPU")
    assert path.name == "gpu_synthetic_gpu.json"
    old, new = decode_row("none", 300.0), decode_row("none", 200.0)
    merge_into(path, ABOUT, lists={"kernels": [copy_row(), old]})
    peer = decode_row("none", 150.0, by="a peer")
    check = {"name": "kernels", "verdict": "ok", "seconds": 3, "note": ""}
    merge_into(path, ABOUT | {"lmdeploy": "9"}, lists={"kernels": [new, peer], "checks": [check]})
    document = read_document(path)
    assert document["about"]["lmdeploy"] == "9"
    assert [row["us"] for row in document["kernels"]] == [COPY_US, 200.0, 150.0]
    assert document["kernels"][1]["of_copy"] > 0 and document["checks"] == [check]
    with pytest.raises(ValueError, match="come from Synthetic GPU"):
        merge_into(path, {"device": "another"}, lists={})
    assert not list(tmp_path.glob("*.part"))


def test_the_version_is_the_package_s():
    assert gpu_results.version() == lmdeploy.__version__


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"about": {}}', '{"about": {}, "kernels": [], "generation": [], "checks": []}',
     '{"about": {"device": "x"}, "kernels": [1], "generation": [], "checks": []}'],
)  # fmt: skip
def test_foreign_files_are_refused(tmp_path, text):
    path = tmp_path / "gpu_x.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"gpu_x\.json"):
        read_document(path)
    assert gpu_tables.main(["--results", str(tmp_path), "--page", str(path)]) == 2


def test_the_page_says_that_nothing_was_measured(tmp_path):
    text = gpu_tables.render([])
    assert gpu_tables.NOTHING in text and "|" not in text
    page = tmp_path / "page.md"
    page.write_text(f"before\n{gpu_tables.BEGIN}\nold\n{gpu_tables.END}\nafter\n")
    assert gpu_tables.main(["--results", str(tmp_path), "--page", str(page), "--check"]) == 1
    assert gpu_tables.main(["--results", str(tmp_path), "--page", str(page)]) == 0
    assert page.read_text() == f"before\n{text}\nafter\n"
    assert gpu_tables.main(["--results", str(tmp_path), "--page", str(page), "--check"]) == 0
    page.write_text("no markers")
    assert gpu_tables.main(["--results", str(tmp_path), "--page", str(page)]) == 2


def test_the_page_shows_what_was_measured(tmp_path):
    rows = [*synthetic_rows(), decode_row("none", 1.5, by="a peer")]
    generation = [
        {
            "by": "ours",
            "work": "decode",
            "model": "llama-3-8b",
            "mode": "nvfp4",
            "shape": {"batch": 32, "context": 512, "quality": "balanced"},
            "tokens_per_s": 1234.5,
            "bytes_per_token": 1.0,
        }
    ]
    checks = gpu_results.check_rows("kernels\tFAILED\t12\tFAILED: one\npeers\tskipped\t0\t")
    path = tmp_path / "gpu_synthetic_gpu.json"
    merge_into(path, ABOUT, lists={"kernels": rows, "generation": generation, "checks": checks})
    (document,) = gpu_tables.read_documents(tmp_path)
    text = gpu_tables.render([document])
    assert "### Synthetic GPU" in text and "a large copy moves 4,000 GB/s" in text
    assert "| kernels | FAILED | 12 s | FAILED: one |" in text
    assert "window 128 with sinks" in text and "best peer, 16 bit" in text and "1.5 µs" in text
    assert "| llama-3-8b | decode | `nvfp4`, balanced | 32 | 512 | 1,234 |" in text
    assert "≥ 0.85" in text and "experts 32" in text and gpu_tables.NOTHING not in text
    widths = {}
    for line in text.splitlines():  # every table is one
        if line.startswith("|"):
            widths.setdefault(line.count("|"), line)
            assert line.endswith("|")


def test_the_page_is_what_the_script_makes():
    documents = gpu_tables.read_documents(ROOT / "benchmarks/results")
    text = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    assert gpu_tables.put_in(text, gpu_tables.render(documents)) == text, (
        "run benchmarks/gpu_tables.py"
    )


def test_verdicts_of_checks():
    with pytest.raises(ValueError, match="wanted one of"):
        gpu_results.check_rows("kernels\tfine\t1\t")
    with pytest.raises(ValueError, match="unpack"):
        gpu_results.check_rows("kernels ok")


def test_peers_are_asked_for_our_shapes(monkeypatch, capsys):
    rows = [
        decode_row("none", 1.0),
        decode_row("nvfp4", 1.0),
        decode_row("none", 1.0, batch=1),
        decode_row("none", 1.0, by="a peer", batch=2),
    ]
    shapes = list(peers_gpu.shapes_of(rows))
    assert [shape["batch"] for shape in shapes] == [8, 1]
    calls: list[str] = []

    def measure(peer: Any, mode: str, *, shape: Any, rotate_bytes: int) -> Row:
        calls.append(mode)
        if mode == "fp8":
            raise RuntimeError("first line\nno kernel")
        if mode == "nvfp4":
            raise peers_gpu.Unsupported("not here")
        return decode_row(mode, 2.0, by=peer.name, **shape)

    monkeypatch.setattr(peers_gpu, "measure", measure)
    monkeypatch.setattr(peers_gpu.FlashInfer, "name", "FlashInfer 0 fa2")
    found: list[Row] = []
    runner = peers_gpu.Runner(shapes, rotate_bytes=512, save=found.append)
    runner.run([peers_gpu.FlashInfer("fa2")], budget_s=60)
    assert [row["mode"] for row in found] == ["none", "none"]
    (failed,) = runner.failed.values()
    assert failed.endswith("no kernel")
    assert capsys.readouterr().out.count("not here") == 2
    assert calls.count("fp8") == 1  # not tried again after it failed while kernels were compiled
    runner = peers_gpu.Runner(shapes, rotate_bytes=512, save=found.append)
    runner.run([peers_gpu.FlashInfer("fa2")], budget_s=0)
    assert len(found) == 2 and "2 shapes left out" in capsys.readouterr().out


def test_each_peer_has_its_part_of_the_time(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(peers_gpu.time, "monotonic", lambda: now[0])

    def measure(peer: Any, mode: str, *, shape: Any, rotate_bytes: int) -> Row:
        now[0] += 1000.0 if rotate_bytes == 1 else 1.0  # compiling is none of the time
        return decode_row(mode, 2.0, by=peer.name, **shape)

    monkeypatch.setattr(peers_gpu, "measure", measure)
    monkeypatch.setattr(peers_gpu.FlashInfer, "name", "FlashInfer")
    monkeypatch.setattr(peers_gpu.TorchSdpa, "name", "torch")
    shapes = [gpu_plan.attention_shape(batch, 8192) for batch in range(1, 21)]
    found: list[Row] = []
    peers = [peers_gpu.TorchSdpa(), peers_gpu.FlashInfer("fa2")]
    peers_gpu.Runner(shapes, rotate_bytes=512, save=found.append).run(peers, budget_s=20)
    assert [row["by"] for row in found] == ["torch"] * 10 + ["FlashInfer"] * 10


def test_a_kernel_is_compiled_once_for_all_its_shapes():
    shapes = [
        *(gpu_plan.attention_shape(batch, 8192) for batch in (1, 8)),
        gpu_plan.attention_shape(8, 8192, head_dim=64),
        gpu_plan.window_shape(8),
        gpu_plan.window_shape(32),
    ]
    tiny = peers_gpu.tiny_shapes(shapes)
    assert [(s["head_dim"], s.get("window", 0)) for s in tiny] == [(128, 0), (64, 0), (64, 128)]
    assert all(shape["batch"] == 1 and shape["context"] == 64 for shape in tiny)


def test_layers_of_peers():
    shape = gpu_plan.attention_shape(1, 1024)  # 4 MiB in 16 bit
    assert peers_gpu.layers_for("none", shape, rotate_bytes=512 << 20) == (128, 128)
    large = gpu_plan.attention_shape(128, 8192)
    assert peers_gpu.layers_for("none", large, rotate_bytes=512 << 20) == (2, 24)


def test_missing_peers_are_named(monkeypatch, capsys, tmp_path):
    def absent(name: str) -> str:
        raise peers_gpu.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(peers_gpu.importlib.metadata, "version", absent)
    monkeypatch.setattr(peers_gpu, "has_gpu", lambda: False)
    path = tmp_path / "gpu.json"
    merge_into(path, ABOUT, lists={})
    assert peers_gpu.main(["--json", str(path)]) == 3
    text = capsys.readouterr().out
    assert "flashinfer-python is not installed" in text and "torch is not installed" in text
    assert peers_gpu.main(["--json", str(path), "--peers", "torch"]) == 3
    assert "flashinfer" not in capsys.readouterr().out
    assert peers_gpu.main(["--json", str(tmp_path / "none.json")]) == 2
    with pytest.raises(SystemExit):
        peers_gpu.main(["--json", str(path), "--peers", "nobody"])
