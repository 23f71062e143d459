"""Check the size limits: lines of files, lines and parameters of functions, in Python and C++.

Prints every violation and exits with 1 if there is one.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import lizard

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 80
MAX_KERNEL_LINES = 150
MAX_PARAMETERS = 6
MAX_POSITIONAL = 2  # in Python; the others are keyword-only
KERNEL_FOLDERS = ("src/turbomind/backend/cpu/isa/", "src/turbomind/backend/cuda/")
CPP_SUFFIXES = {".cc", ".h", ".cu", ".cuh"}
# Signatures that LMDeploy's users know, or that a library defines.
FIXED = {
    "lmdeploy/api.py": {"pipeline", "serve", "client"},
    "lmdeploy/pipeline.py": {"__init__", "stream_infer", "chat", "get_ppl", "infer"},
    "tests/cpp/cuda_shim/cublas_lt.cc": {"cublasLtMatmulAlgoGetHeuristic", "cublasLtMatmul"},
}

Function = tuple[str, int, int, int, int]  # name, line, lines, parameters, positional parameters


def cpp_functions(path: Path, source: str) -> Iterator[Function]:
    """Yield the functions of a C++ or CUDA file."""
    for found in lizard.analyze_file.analyze_source_code(f"{path.stem}.cc", source).function_list:
        lines = found.end_line - found.start_line + 1
        yield found.name.split("::")[-1], found.start_line, lines, len(found.full_parameters), 0


def python_functions(source: str) -> Iterator[Function]:
    """Yield the functions and methods of a Python file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = [a.arg for a in node.args.posonlyargs + node.args.args]
            positional = len(names) - (names[:1] in (["self"], ["cls"]))
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            yield node.name, node.lineno, lines, positional + len(node.args.kwonlyargs), positional


def violations(path: Path, source: str) -> Iterator[str]:
    """Yield one line per limit that a file breaks."""
    lines = source.count("\n")
    if lines > MAX_FILE_LINES:
        yield f"{path}: {lines} lines, at most {MAX_FILE_LINES}"
    is_python, is_test = path.suffix == ".py", "tests" in path.parts
    is_kernel = path.as_posix().startswith(KERNEL_FOLDERS)
    limit = MAX_KERNEL_LINES if is_kernel else MAX_FUNCTION_LINES
    functions = python_functions(source) if is_python else cpp_functions(path, source)
    for name, line, num_lines, parameters, positional in functions:
        where = f"{path}:{line}: {name}"
        if num_lines > limit:
            yield f"{where}: {num_lines} lines, at most {limit}"
        is_fixed = name in ("__exit__", "__call__") or name in FIXED.get(path.as_posix(), ())
        if is_fixed or (is_python and is_test):  # pytest passes fixtures by name
            continue
        if parameters > MAX_PARAMETERS:
            yield f"{where}: {parameters} parameters, at most {MAX_PARAMETERS}"
        if positional > MAX_POSITIONAL:
            yield f"{where}: {positional} positional parameters, at most {MAX_POSITIONAL}"


def main() -> int:
    """Check the files that git tracks."""
    listed = subprocess.run(["git", "ls-files"], check=True, capture_output=True, text=True)
    paths = [Path(name) for name in listed.stdout.splitlines()]
    files = [p for p in paths if p.suffix in CPP_SUFFIXES | {".py"} and p.exists()]
    found = [line for p in files for line in violations(p, p.read_text(encoding="utf-8"))]
    print("\n".join([*found, f"{len(files)} files, {len(found)} over a limit"]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
