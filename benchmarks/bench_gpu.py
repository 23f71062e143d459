"""Measure the speed of ops on a GPU, print rows and merge them into one file of JSON Lines.

    python benchmarks/bench_gpu.py device --bench build/cuda/device_bench --json FILE
    python benchmarks/bench_gpu.py tuner --bench build/cuda/device_bench --json FILE
    python benchmarks/bench_gpu.py baselines --json FILE
    python benchmarks/bench_gpu.py machine --bench build/cuda/device_bench

`device` times single ops, the most important cells first. `tuner` times the kernels between which
the engine chooses for the linear layers of an 8B model. `baselines` times cuBLAS, cuDNN,
FlashAttention 2, XQA and FlashInfer on the cells of the file that they compute. `machine` prints
how rows name the device. Rows go to the file as they are measured; a new row replaces the row of
the same cell. Nothing begins after --budget-s. Exit status: 0, 1 if a cell failed, 2 for wrong
arguments, 3 if there is no GPU. bench_engine.py --device cuda times the engine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

from results import ResultsFile, Row, read_rows

NO_GPU = 3
OURS = "lmdeploy-fp4"
ROW_KEY = ("by", "cell")
START_TIMEOUT_S = 60.0
FEW_MODES = ("none", "fp8", "nvfp4", "mxfp4")  # the formats that are measured first
FORMATS = ("bf16", "q8_0", "q4_0", "mxfp4_split")
# Matrices of an 8B model (hidden 4096, 32 heads of 128, 8 KV heads).
LINEARS = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
# Prompts, and a chunk that continues one.
PREFILLS = (
    "batch=1 context=8192 new_tokens=8192 kv_heads=8 group=4 head_dim=128",
    "batch=1 context=8192 new_tokens=2048 kv_heads=8 group=4 head_dim=128",
    "batch=1 context=8192 new_tokens=8192 kv_heads=8 group=8 head_dim=64",
    "batch=1 context=8192 new_tokens=8192 kv_heads=8 group=1 head_dim=96",
    "batch=1 context=8192 new_tokens=8192 kv_heads=8 group=2 head_dim=256",
    "batch=16 context=512 new_tokens=512 kv_heads=8 group=4 head_dim=128",
    "batch=1 context=8192 new_tokens=8192 kv_heads=8 group=8 head_dim=64 window=128 sinks=1",
)


# Attention over latents: heads, and sequences that decode.
LATENTS = ((16, 1), (16, 32), (128, 1), (128, 32))


def device_cells(formats: Sequence[str]) -> Iterator[str]:
    """Yield the cells of device_bench, the most important first. A run may end at any of them."""
    modes = [*FEW_MODES, *(name for name in formats if name not in FEW_MODES)]
    yield "op=copy mb=4096"
    heads = "kv_heads=8 group=8"
    for batch, context in ((8, 32768), (32, 32768), (128, 8192), (1, 131072), (256, 1024)):
        for mode in modes:
            yield f"op=decode mode={mode} batch={batch} context={context} {heads} head_dim=128"
    window = "kv_heads=8 group=8 head_dim=64 context=4096 window=128 sinks=1"
    for batch in (8, 32):
        for mode in modes:
            yield f"op=decode mode={mode} batch={batch} {window}"
    for context in (8192, 32768):
        for mode in FEW_MODES:
            sizes = f"batch=1 context={context} new_tokens=2048 {heads} head_dim=128"
            yield f"op=prefill mode={mode} launches=4 {sizes}"
    for context in (2048, 8192):
        for mode in ("none", "nvfp4"):
            sizes = f"batch=1 context={context} new_tokens={context} kv_heads=8 group=4"
            yield f"op=prefill mode={mode} launches=4 {sizes} head_dim=128"
    for sizes in PREFILLS:  # both kernels of attention, whichever the tuner chooses
        for products in ("mma", "wgmma"):
            yield f"op=prefill mode=none launches=4 {sizes} products={products}"
    for batch, tokens in ((1, 2048), (128, 1)):
        sizes = f"batch={batch} context=2048 new_tokens={tokens} kv_heads=8 group=4 head_dim=128"
        for mode in modes:
            yield f"op=write mode={mode} {sizes}"
        for mode in ("nvfp4", "mxfp4"):
            yield f"op=write mode={mode} {sizes} search=1 rotate=1"
    for head_count, batch in LATENTS:
        for mode in modes:
            yield f"op=latents mode={mode} batch={batch} context=8192 heads={head_count}"
    for mode in ("none", "nvfp4"):
        yield f"op=latents mode={mode} launches=4 context=8192 new_tokens=512 heads=16"
    offset_heads = f"{heads} head_dim=128 k_offset=1"
    for mode in ("nvfp4", "mxfp4"):
        for batch, context in ((8, 32768), (128, 8192)):
            yield f"op=decode mode={mode} batch={batch} context={context} {offset_heads}"
        sizes = f"batch=1 context=32768 new_tokens=2048 {offset_heads}"
        yield f"op=prefill mode={mode} launches=4 {sizes}"
        for batch, tokens in ((1, 2048), (128, 1)):
            sizes = f"batch={batch} context=2048 new_tokens={tokens} kv_heads=8 head_dim=128"
            yield f"op=quantize mode={mode} {sizes} search=1"
            for window in ("none", "int8"):
                yield f"op=quantize mode={mode} {sizes} search=1 k_offset=1 window_format={window}"
    for batch in (1, 32, 128, 2048):
        launches = " launches=4" if batch > 256 else ""
        for rows, cols in LINEARS:
            for name in FORMATS:
                yield f"op=linear format={name} batch={batch} rows={rows} cols={cols}{launches}"
    for mode in FEW_MODES:
        yield f"op=flatten mode={mode} batch=1 context=32768 {heads} head_dim=128"


def tuner_cells() -> Iterator[str]:
    """Yield the cells whose answers are tables of the tuner."""
    for name in FORMATS:
        for rows, cols in LINEARS:
            yield f"op=tune format={name} batch=1024 rows={rows} cols={cols}"
    for mode in FEW_MODES:
        for heads in ("head_dim=128 group=4", "head_dim=128 group=8", "head_dim=64 group=8"):
            yield f"op=tune_attention mode={mode} batch=64 kv_heads=8 {heads}"
    yield "op=tune_attention mode=nvfp4 batch=64 kv_heads=8 head_dim=64 group=8 window=128"
    for head_dim, group in ((96, 1), (256, 2)):
        yield f"op=tune_attention mode=none batch=64 kv_heads=8 head_dim={head_dim} group={group}"


def small_tuner_cells() -> Iterator[str]:
    """Yield tiny cells of the tuner, to test the program on any device."""
    yield "op=tune format=q4_0 batch=2 rows=64 cols=64"
    yield "op=tune_attention mode=nvfp4 kv_heads=1 group=2 head_dim=64"


def small_cells() -> Iterator[str]:
    """Yield one tiny cell of every op, to test the program on the stand-in for a GPU."""
    yield "op=copy mb=1"
    sizes = "launches=1 batch=2 context=96 kv_heads=1 group=2 head_dim=64"
    for mode in FEW_MODES:
        for op in ("decode", "write", "flatten", "prefill"):
            more = " new_tokens=16" if op == "prefill" else ""
            yield f"op={op} mode={mode} {sizes}{more}"
    yield f"op=prefill mode=none {sizes} new_tokens=16 products=wgmma"
    for op in ("decode", "quantize", "prefill"):
        yield f"op={op} mode=nvfp4 {sizes} new_tokens={16 if op == 'prefill' else 1} k_offset=1"
    for tokens in (1, 3):
        sizes = f"batch=2 context=70 new_tokens={tokens} heads=4 rank=32 rotary=16"
        yield f"op=latents mode=nvfp4 launches=1 {sizes}"
    for name in FORMATS:
        yield f"op=linear format={name} launches=1 batch=2 rows=64 cols=64"


def kv_formats(bench: Path) -> list[str]:
    """Return the KV formats that device_bench was built with."""
    done = subprocess.run(
        [bench, "formats"], capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip())
    return done.stdout.split()


def answers(command: Sequence[str], cells: Sequence[str]) -> Generator[Row, None, None]:
    """Yield what the program says about the device, then its answer to each cell.

    A cell that ends the program gets an error, and the program starts again with the next one.
    Raise RuntimeError if the program does not start.
    """
    pending, num_starts = list(cells), 0
    while pending:
        text = "".join(f"{cell}\n" for cell in pending)
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdin is not None and process.stdout is not None
            with contextlib.suppress(BrokenPipeError), process.stdin:
                process.stdin.write(text)
            try:
                lines = (json.loads(line) for line in process.stdout if line.startswith("{"))
                about = next(lines, None)
                if about is None:
                    raise RuntimeError(f"{command[0]} ended with status {process.wait()}")
                if num_starts == 0:
                    yield about
                for answer in lines:
                    yield {"cell": pending.pop(0), **answer}
            finally:
                process.kill()
        num_starts += 1
        if pending:
            yield {"cell": pending.pop(0), "error": f"exit status {process.returncode}"}


def machine_of(about: Row) -> str:
    """Return the facts about the device that device_bench prints, as rows name it."""
    labels = {"device": "", "generation": "", "driver": "driver ", "cuda": "CUDA "}
    return ", ".join(label + str(about[key]) for key, label in labels.items() if key in about)


def cells_of(options: argparse.Namespace) -> Iterator[str]:
    """Yield the cells that the options select."""
    if options.what == "tuner":
        return small_tuner_cells() if options.small else tuner_cells()
    return small_cells() if options.small else device_cells(kv_formats(options.bench))


def measure_ours(options: argparse.Namespace) -> list[str]:
    """Measure with device_bench and return what failed."""
    command = [str(options.bench), f"device={options.device}"]
    command += ["rotate_mb=0", "round_ms=0"] if options.small else []
    cells = list(cells_of(options))
    end, num_rows, failed = time.monotonic() + options.budget_s, 0, []
    with contextlib.closing(answers(command, cells)) as found:
        file = ResultsFile(options.json, machine=machine_of(next(found)), key=ROW_KEY)
        for answer in found:
            if "error" in answer:
                failed.append(f"{answer['cell']}: {answer['error']}")
            elif "skipped" in answer:
                print(f"skipped, {answer['skipped']}: {answer['cell']}")
            else:
                file.add({"by": OURS, **answer})
                print(json.dumps(file.rows[-1]), flush=True)
                num_rows += 1
            if time.monotonic() >= end:
                print("the time is over")
                break
    return failed or ([] if num_rows else ["nothing was measured"])


def print_machine(options: argparse.Namespace) -> list[str]:
    """Print the machine of the rows of this device."""
    command = [str(options.bench), f"device={options.device}"]
    print(machine_of(next(answers(command, [""]))))
    return []


def measure_baselines(options: argparse.Namespace) -> list[str]:
    """Measure other libraries on the cells of the file and return what failed."""
    from baselines import gpu

    rows = read_rows(options.json)
    if not rows:
        raise ValueError(f"{options.json} has no rows; run `bench_gpu.py device` first.")
    file = ResultsFile(options.json, machine=rows[0]["machine"], key=ROW_KEY)

    def save(row: Row) -> None:
        file.add(row, is_of_commit=False)
        print(json.dumps(file.rows[-1]), flush=True)

    cells = list(dict.fromkeys(row["cell"] for row in rows if row.get("by") == OURS))
    return gpu.measure_all(cells, save=save, budget_s=options.budget_s)


def resolved(text: str) -> Path:
    """Return an absolute path. A program without a folder would be searched on PATH."""
    return Path(text).resolve()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("what", choices=("device", "tuner", "baselines", "machine"))
    parser.add_argument("--bench", type=resolved, help="the program device_bench")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--budget-s", type=float, default=160.0, help="default: %(default)s")
    parser.add_argument("--json", type=Path, help="the file of the rows")
    parser.add_argument("--small", action="store_true", help="tiny cells, to test the program")
    options = parser.parse_args(arguments)
    if options.what != "baselines" and not options.bench:
        parser.error(f"{options.what} needs --bench.")
    if options.what != "machine" and not options.json:
        parser.error(f"{options.what} needs --json.")
    try:
        measures = {"baselines": measure_baselines, "machine": print_machine}
        failed = measures.get(options.what, measure_ours)(options)
    except RuntimeError as error:
        print(f"bench_gpu.py: no GPU, or the program does not start: {error}", file=sys.stderr)
        return NO_GPU
    except (ValueError, OSError) as error:
        print(f"bench_gpu.py: {error}", file=sys.stderr)
        return 2
    for line in failed:
        print(f"FAILED: {line}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
