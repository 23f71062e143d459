#!/usr/bin/env bash
# Runs every check of the tree, locally and in CI. Every step runs even if an earlier one fails. The
# summary lists the failed steps, and the exit status is then 1. A step prints what it cannot run on
# this machine (no nvcc, missing CPU instructions, a missing package). Skipped steps and skipped Python
# tests are counted.
#
#   scripts/check.sh                 all steps
#   scripts/check.sh ruff mypy …     only these, also asan and tsan with all their tests
set -uo pipefail
cd "$(dirname "$0")/.."

readonly MAX_WHEEL_BYTES=$((15 * 1024 * 1024))
readonly TIDY_BUDGET_S="${TIDY_BUDGET_S:-40}"
readonly TIDY_CHECKS='-*,bugprone-use-after-move,bugprone-dangling-handle,bugprone-infinite-loop,bugprone-sizeof-expression,bugprone-undefined-memory-manipulation,bugprone-unhandled-self-assignment,clang-analyzer-core.*,clang-analyzer-cplusplus.*,misc-unused-using-decls,performance-for-range-copy,performance-unnecessary-value-param'
BUILD_ROOT=$(realpath -m "${CHECK_BUILD_ROOT:-build}")
VENV=$(realpath -ms "${LMDEPLOY_VENV:-.venv}")
readonly BUILD_ROOT VENV
readonly JOBS="$(nproc)"
readonly SKIPPED=77 # a step's status
# The Python tests whose results depend on the instruction set. Damaged files, sizes in memory and the
# stand-in for GPUs do not. Tests with SmolLM2 take most of the time, in torch; tiny models remain.
readonly COMPUTING_TESTS=(components/kv_cache tests/python/{checkpoint,engine,models}
  -k 'not damaged and not truncated and not memory and not devices and not smollm2')
export PATH="$VENV/bin:$PATH"
# The compiler cache then finds what another checkout of this tree has compiled.
export CCACHE_BASEDIR="$PWD" CCACHE_NOHASHDIR=1
# Color codes and the terminal's width must not change what a test sees.
export NO_COLOR=1 COLUMNS=100

python="$VENV/bin/python"
[ -x "$python" ] || {
  echo "check.sh: no virtual environment at $VENV: run scripts/setup.sh test first" >&2
  exit 2
}

cpp_files() { git ls-files '*.cc' '*.cu' '*.cuh' '*.h'; }

# Prints a number that grows by one with every commit, or the commit time in a shallow clone.
turn() {
  if [ "$(git rev-parse --is-shallow-repository)" = true ]; then
    git log -1 --format=%ct
  else
    git rev-list --count HEAD
  fi
}

# configure NAME EXTRA-CMAKE-ARGUMENTS…: configures the build folder NAME.
configure() {
  local folder="$BUILD_ROOT/$1"
  shift
  local launcher=()
  command -v ccache >/dev/null && launcher=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
  cmake -S . -B "$folder" -G Ninja -DTM_BUILD_TESTS=ON -DTM_CUDA=OFF -DPython_EXECUTABLE="$python" \
    -Dpybind11_DIR="$("$python" -m pybind11 --cmakedir)" "${launcher[@]}" "$@" >"$folder.log" 2>&1 ||
    { tail -n 20 "$folder.log"; return 1; }
}

step_ruff() { ruff check . && ruff format --check .; }

step_mypy() {
  mypy && mypy --strict --ignore-missing-imports scripts/*.py scripts/eval scripts/dev/*.py \
    benchmarks/*.py benchmarks/baselines tests/python/support/fake_engine.py
}

step_clang_format() { cpp_files | xargs -r clang-format --dry-run --Werror; }

step_sizes() { "$python" scripts/dev/check_sizes.py; }

# Fails if the compiler prints a warning. The step searches the output instead of using -Werror, so
# that setup.sh and the wheel compile with the same flags and share the compiler cache, which repeats
# warnings.
step_build() {
  local log="$BUILD_ROOT/release.ninja.log"
  configure release -DTM_BUILD_PYTHON=ON || return 1
  ninja -C "$BUILD_ROOT/release" -j "$JOBS" --quiet 2>&1 | tee "$log"
  [ "${PIPESTATUS[0]}" = 0 ] || return 1
  ! grep -q 'warning:' "$log" || {
    ninja -C "$BUILD_ROOT/release" -t clean >/dev/null # so that the next run prints the warnings again
    return 1
  }
}

step_ctest() {
  (cd "$BUILD_ROOT/release" && "$python" -c '
import _turbomind
all_sets, here = ("scalar", "avx2", "avx512", "amx"), _turbomind.available_cpu_isas()
rest = sorted(set(all_sets) - set(here)) or ["none"]
print("instruction sets tested:", *here, "- only with the stand-in (cpu_shim):", *rest)') || return 1
  ctest --test-dir "$BUILD_ROOT/release" --no-tests=error --output-on-failure -j "$JOBS" --timeout 300
}

# Applies mutations to the CUDA kernels, which their tests must catch. Each commit tests other ones.
step_mutations() {
  "$python" scripts/dev/mutation_test.py --build "$BUILD_ROOT/release" --turn "$(turn)"
}

# Compiles for a GPU, links what scripts/gpu_check.sh runs, and checks the registers of all kernels.
# Each commit compiles for another architecture, unless CUDA_ARCHS names them. Without nvcc, the step
# is skipped.
step_cuda() {
  local folder="$BUILD_ROOT/cuda_check" launcher=() count archs=(90a 80)
  local arch="${CUDA_ARCHS:-${archs[$(turn) % ${#archs[@]}]}}"
  command -v nvcc >/dev/null || return "$SKIPPED"
  echo "architectures: $arch"
  command -v ccache >/dev/null && launcher=(-DCMAKE_CUDA_COMPILER_LAUNCHER=ccache)
  configure cuda_check -DTM_BUILD_PYTHON=OFF -DTM_CUDA=ON "-DTM_CUDA_ARCHS=$arch" \
    -DCMAKE_CUDA_FLAGS=-Xptxas=-v "${launcher[@]}" || return 1
  ninja -C "$folder" -j "$JOBS" gpu_check >"$folder.ninja.log" 2>&1 ||
    { tail -n 40 "$folder.ninja.log"; return 1; }
  "$python" scripts/dev/check_cuda.py --log "$folder.ninja.log" || {
    ninja -C "$folder" -t clean >/dev/null # so that the next run compiles the same kernels again
    return 1
  }
  count=$("$folder/gpu_ops_test" --count) && echo "gpu_ops_test: ${count##* } test cases"
}

# run_pytest ARGUMENTS…: runs Python tests with what the step build has built.
run_pytest() {
  cp "$BUILD_ROOT"/release/{_turbomind*.so,libkvx.so.1} lmdeploy/ &&
    TM_BUILD_FOLDER="$BUILD_ROOT/release" "$python" -m pytest -rs --timeout 300 \
      --numprocesses "$JOBS" --maxprocesses 4 --dist loadgroup "$@"
}

# Runs the Python tests with the fastest instruction set of this machine.
step_pytest() { run_pytest; }

# Repeats the tests that compute with another instruction set of this machine. Each commit has
# another one. Scalar code would take too long; the step ctest compares its bits with those of the
# others.
step_pytest_isas() {
  local isas isa
  isas=$(cd "$BUILD_ROOT/release" && "$python" -c '
import _turbomind
print(*_turbomind.available_cpu_isas()[1:-1])') || return 1
  read -ra isas <<<"$isas"
  [ "${#isas[@]}" -gt 0 ] || { echo "this machine has no further instruction set"; return "$SKIPPED"; }
  isa="${LMDEPLOY_CPU_ISA:-${isas[$(turn) % ${#isas[@]}]}}"
  echo "instruction set: $isa"
  LMDEPLOY_CPU_ISA="$isa" run_pytest "${COMPUTING_TESTS[@]}"
}

# tidy_one DEADLINE FILE: checks the file, or prints its name after the deadline (seconds since 1970).
# clang-tidy comes from its wheel, because that of Debian 12 does not support std::source_location.
tidy_one() {
  if [ "$(date +%s)" -ge "$1" ]; then
    echo "clang-tidy: $2 is skipped because $TIDY_BUDGET_S s have passed (TIDY_BUDGET_S)"
    return 0
  fi
  clang-tidy -p "$BUILD_ROOT/release" --quiet --checks="$TIDY_CHECKS" --warnings-as-errors='*' \
    "$2" 2>/dev/null
}

# Checks host files until the time is over, first those that differ from the main branch. The others
# begin at another file with each commit, so that every file is checked in the course of commits.
step_clang_tidy() {
  local files first
  export -f tidy_one
  export TIDY_BUDGET_S TIDY_CHECKS BUILD_ROOT
  files=$(git ls-files 'src/*.cc' 'components/*.cc' | grep -v /tests/)
  first=$(($(turn) % $(wc -l <<<"$files")))
  (git diff --name-only --diff-filter=d origin/main... -- 'src/*.cc' 'components/*.cc' 2>/dev/null
    tail -n "+$((first + 1))" <<<"$files"
    head -n "$first" <<<"$files") | grep -Ev 'backend/cpu/isa/|/tests/' | awk '!seen[$0]++' |
    xargs -P "$JOBS" -n 1 bash -c 'tidy_one "$@"' _ $(($(date +%s) + TIDY_BUDGET_S))
}

# Prints the instruction sets of a build with sanitizers: scalar code and another one that this
# machine can run. Each commit has other ones.
sanitized_isas() {
  local sets=(avx2)
  if grep -q avx512_bf16 /proc/cpuinfo; then sets+=("avx512;amx"); fi
  echo "scalar;${sets[$(turn) % ${#sets[@]}]}"
}

# run_sanitized NAME FLAGS FOLDERS: builds and runs the C++ tests of the folders with sanitizers.
run_sanitized() {
  local name="$1" flags="$2" folders="$3" folder="$BUILD_ROOT/$1" tests isas
  isas=$(sanitized_isas) && echo "instruction sets: $isas"
  configure "$name" -DTM_BUILD_PYTHON=OFF -DTM_SANITIZE="$flags" "-DTM_CPU_ISAS=$isas" || return 1
  tests=$(git ls-files '*_test.cc' | grep -E "^(tests/cpp|components)/($folders)/" |
    xargs -r -n1 basename | sed 's/\.cc$//')
  [ -n "$tests" ] || { echo "no tests of $folders"; return 1; }
  # shellcheck disable=SC2086  # one word per target
  ninja -C "$folder" -j "$JOBS" --quiet $tests &&
    ctest --test-dir "$folder" --no-tests=error --output-on-failure -j "$JOBS" --timeout 600 \
      -R "^($folders)/"
}

step_asan() {
  ASAN_OPTIONS=detect_leaks=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
    run_sanitized asan address,undefined \
    "${ASAN_FOLDERS:-core|kv|ops|profile|model|kvx|kv_cache|cpu|engine}"
}

step_tsan() { TSAN_OPTIONS=halt_on_error=1 run_sanitized tsan thread 'core|engine|kvx'; }

# Each commit runs a third of the tests with sanitizers.
step_sanitizers() {
  case $(($(turn) % 3)) in
    0) ASAN_FOLDERS='core|kv|ops|profile|model|kvx|kv_cache' step_asan ;;
    1) ASAN_FOLDERS='cpu|engine' step_asan ;;
    2) step_tsan ;;
  esac
}

step_wheel() {
  local folder="$BUILD_ROOT/wheel" wheel bytes missing
  rm -rf "$folder"
  PYTHON="$python" TM_CUDA=OFF scripts/wheel.sh "$folder" || return 1
  wheel=$(ls "$folder"/*.whl) && bytes=$(stat -c %s "$wheel")
  echo "wheel: $(basename "$wheel"), $bytes bytes, at most $MAX_WHEEL_BYTES"
  [ "$bytes" -le "$MAX_WHEEL_BYTES" ] || return 1
  "$python" -m zipfile -e "$wheel" "$folder/unpacked" || return 1
  missing=$(git ls-files 'lmdeploy/*.py' 'lmdeploy/*.pyi' lmdeploy/py.typed lmdeploy/serve/web |
    while read -r file; do [ -e "$folder/unpacked/$file" ] || echo "$file"; done)
  [ -z "$missing" ] || { echo "not in the wheel:" "$missing"; return 1; }
  (cd "$folder/unpacked" && "$python" -c '
from pathlib import Path
import lmdeploy
from lmdeploy import _turbomind
assert Path(_turbomind.__file__).parent == Path.cwd() / "lmdeploy", _turbomind.__file__
assert _turbomind.make_cpu_device(1)
from lmdeploy.kvx import include_folder, library
assert library() and (include_folder() / "kvx/kvx_abi.h").is_relative_to(Path.cwd())')
}

readonly ALL_STEPS=(ruff mypy clang_format sizes build ctest mutations cuda pytest pytest_isas clang_tidy sanitizers wheel)
steps=("$@")
[ $# -gt 0 ] || steps=("${ALL_STEPS[@]}")
for step in "${steps[@]}"; do
  declare -F "step_$step" >/dev/null || {
    echo "check.sh: step '$step' is unknown; choose from ${ALL_STEPS[*]}" >&2
    exit 2
  }
done

# Adds the numbers at the start of lines. Without lines, prints nothing.
add_up() { awk '{ sum += $1 } END { if (NR) print sum }'; }

# count_tests VERDICT LOG: prints "PASSED FAILED SKIPPED" from the last line of each pytest or of
# ctest. Other steps count as one test. A failed step has at least one failure.
count_tests() {
  local passed failed skipped
  [ "$1" = skipped ] && echo "0 0 1" && return
  skipped=$(grep -E '^=*[ ]?([0-9]+ failed, )?[0-9]+ passed' "$2" | grep -oE '[0-9]+ skipped' | add_up)
  skipped=${skipped:-0}
  passed=$(grep -oE '^=*[ ]?([0-9]+ failed, )?[0-9]+ passed' "$2" | grep -oE '[0-9]+ passed' | add_up)
  failed=$(grep -oE '[0-9]+ (failed|error)' "$2" | tail -n 1)
  if grep -qE 'tests passed(, [0-9]+ tests failed)? out of' "$2"; then
    failed=$(grep -oE '[0-9]+ tests failed' "$2" | tail -n 1)
    failed=${failed:-0}
    passed=$(($(grep -oE 'out of [0-9]+' "$2" | tail -n 1 | grep -oE '[0-9]+') - ${failed%% *}))
  fi
  failed=${failed%% *}
  [ "$1" = ok ] && echo "${passed:-1} 0 $skipped" && return
  [ "${failed:-0}" -gt 0 ] || failed=1
  echo "${passed:-0} $failed $skipped"
}

mkdir -p "$BUILD_ROOT"
summary=()
status=0 all_passed=0 all_failed=0 all_skipped=0
for step in "${steps[@]}"; do
  echo "== $step"
  begun=$SECONDS log="$BUILD_ROOT/step_$step.log"
  "step_$step" 2>&1 | tee "$log"
  case "${PIPESTATUS[0]}" in
    0) verdict=ok ;;
    "$SKIPPED") verdict=skipped ;;
    *) verdict=FAILED status=1 ;;
  esac
  read -r passed failed skipped <<<"$(count_tests "$verdict" "$log")"
  all_passed=$((all_passed + passed)) all_failed=$((all_failed + failed))
  all_skipped=$((all_skipped + skipped))
  summary+=("$(printf '%-14s %-7s %4d s' "$step" "$verdict" $((SECONDS - begun)))")
done
printf '\n== summary\n'
printf '%s\n' "${summary[@]}"
echo "== $all_passed passed, $all_failed failed, $all_skipped skipped in $SECONDS s (tests; other steps count as one)"
exit "$status"
