"""Size limits: lines of a file, lines and parameters of a function, in Python and C++.

Prints every offender and exits with 1 when there is one.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 80
MAX_KERNEL_LINES = 150
MAX_PARAMETERS = 6
MAX_POSITIONAL = 2  # Python: keyword-only after the second

KERNEL_FOLDERS = ("src/turbomind/backend/cpu/isa/", "src/turbomind/backend/cuda/")
CPP_SUFFIXES = {".cc", ".h", ".cu", ".cuh"}
IGNORED_IN_CPP = re.compile(
    r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|(?<![0-9A-Za-z_])'(?:\\.|[^'\\\n])+'"""
    r"""|^[ \t]*\#(?:[^\n]*\\\n)*[^\n]*""",
    re.DOTALL | re.MULTILINE | re.VERBOSE,
)
FUNCTION_HEADER = re.compile(
    r"""\)(?:\s*(?:const|noexcept|override|final|mutable|&&?|requires[^{]*|->[^{]*))*\s*$""",
    re.VERBOSE,
)


@dataclass(frozen=True)
class Function:
    """One definition. `positional` counts parameters that may be passed by position."""

    name: str
    line: int
    lines: int
    parameters: int
    positional: int = 0


def blank(match: re.Match[str]) -> str:
    """Nothing but the line ends of what was matched."""
    return "\n" * match.group().count("\n")


def count_parameters(text: str) -> int:
    """Commas between parameters: those inside (), [], {} or <> do not count."""
    if not text.strip() or text.strip() == "void":
        return 0
    depth, commas = 0, 0
    for char in text:
        if char in "([{<":
            depth += 1
        elif char in ")]}>":
            depth -= 1
        elif char == "," and depth == 0:
            commas += 1
    return commas + 1


def first_parentheses(header: str) -> tuple[str, str]:
    """(name before, text inside) the parameter list of a function header."""
    start = header.find("(")
    while start > 0 and re.search(r"(?:requires|decltype|alignas|operator)\s*$", header[:start]):
        start = header.find("(", start + 1)
    depth = 0
    for end in range(start, len(header)):
        depth += {"(": 1, ")": -1}.get(header[end], 0)
        if depth == 0:
            names = re.findall(r"[\w:~]+", header[:start])
            return (names[-1] if names else "?"), header[start + 1 : end]
    return "?", ""


def is_function(header: str) -> bool:
    """Whether the text before a `{` is the head of a function (or constructor)."""
    if "(" not in header or re.match(r"\s*(?:namespace|class|struct|enum|union)\b", header):
        return False
    return bool(FUNCTION_HEADER.search(header) or re.search(r"\)\s*:\s*\w", header))


def cpp_functions(source: str) -> Iterator[Function]:
    """Outermost functions of a C++ file, found by their braces."""
    text = IGNORED_IN_CPP.sub(blank, source)
    header_start, i = 0, 0
    while i < len(text):
        char = text[i]
        if char == "{":
            header = text[header_start:i]
            initialiser = bool(re.search(r"[\w>]$", header))
            if is_function(header) or initialiser:
                end = matching_brace(text, i)
                if initialiser:
                    i = end + 1
                    continue
                first = header_start + len(header) - len(header.lstrip())
                name, inside = first_parentheses(header)
                line = text.count("\n", 0, first) + 1
                yield Function(
                    name, line, text.count("\n", first, end) + 1, count_parameters(inside)
                )
                i = end
            header_start = i + 1
        elif char in "};":
            header_start = i + 1
        i += 1


def matching_brace(text: str, start: int) -> int:
    """Index of the `}` that closes the `{` at `start`, or the end of the text."""
    depth = 0
    for i in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return i
    return len(text)


def python_functions(source: str) -> Iterator[Function]:
    """Every function and method of a Python file."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        arguments = node.args
        positional = [a.arg for a in arguments.posonlyargs + arguments.args]
        if positional[:1] in (["self"], ["cls"]):
            positional = positional[1:]
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        total = len(positional) + len(arguments.kwonlyargs)
        yield Function(node.name, node.lineno, lines, total, len(positional))


def complaints(path: Path) -> Iterator[str]:
    """One line per limit that a file breaks."""
    source = path.read_text(encoding="utf-8")
    lines = source.count("\n")
    if lines > MAX_FILE_LINES:
        yield f"{path}: {lines} lines, at most {MAX_FILE_LINES}"
    python = path.suffix == ".py"
    kernel = path.as_posix().startswith(KERNEL_FOLDERS)
    limit = MAX_KERNEL_LINES if kernel else MAX_FUNCTION_LINES
    test = path.parts[0] == "tests"
    for function in python_functions(source) if python else cpp_functions(source):
        where = f"{path}:{function.line}: {function.name}"
        if function.lines > limit:
            yield f"{where}: {function.lines} lines, at most {limit}"
        if python and test:
            continue  # fixtures and parameters of tests come by name
        if function.parameters > MAX_PARAMETERS and not is_fixed(path, function):
            yield f"{where}: {function.parameters} parameters, at most {MAX_PARAMETERS}"
        if python and function.positional > MAX_POSITIONAL and not is_fixed(path, function):
            yield f"{where}: {function.positional} by position, at most {MAX_POSITIONAL}"


def is_fixed(path: Path, function: Function) -> bool:
    """Functions whose signature users know from LMDeploy, or that a library calls by position."""
    fixed = {
        "lmdeploy/api.py": {"pipeline", "serve", "client"},
        "lmdeploy/pipeline.py": {"__init__", "stream_infer", "chat", "get_ppl", "infer"},
        "tests/cpp/cuda_shim/cublas_lt.cc": {"cublasLtMatmulAlgoGetHeuristic", "cublasLtMatmul"},
    }
    return function.name in ("__exit__", "__call__") or function.name in fixed.get(
        path.as_posix(), set()
    )


def tracked_files() -> list[Path]:
    """Python and C++ files that git knows, and still exist."""
    names = subprocess.run(["git", "ls-files"], check=True, capture_output=True, text=True)
    paths = [Path(name) for name in names.stdout.splitlines()]
    return [p for p in paths if p.suffix in CPP_SUFFIXES | {".py"} and p.exists()]


def main() -> int:
    """Check the tree below the working directory."""
    files = tracked_files()
    found = [line for path in files for line in complaints(path)]
    print("\n".join([*found, f"{len(files)} files, {len(found)} over a limit"]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
