#!/usr/bin/env bash
# The single truth about the state of the tree, locally and in CI. Every step runs even when an
# earlier one fails; the summary at the end names what failed, and the exit status is 1 then.
#
#   scripts/check.sh                 all steps
#   scripts/check.sh ruff mypy …     only these
set -uo pipefail
cd "$(dirname "$0")/.."

readonly MAX_WHEEL_BYTES=$((15 * 1024 * 1024))
readonly TIDY_BUDGET_S="${TIDY_BUDGET_S:-180}"
readonly TIDY_CHECKS='-*,bugprone-use-after-move,bugprone-dangling-handle,bugprone-infinite-loop,bugprone-sizeof-expression,bugprone-undefined-memory-manipulation,bugprone-unhandled-self-assignment,clang-analyzer-core.*,clang-analyzer-cplusplus.*,misc-unused-using-decls,performance-for-range-copy,performance-unnecessary-value-param'
readonly BUILD_ROOT="${CHECK_BUILD_ROOT:-$PWD/build}"
readonly VENV="${LMDEPLOY_VENV:-$PWD/.venv}"
readonly JOBS="$(nproc)"
export PATH="$VENV/bin:$PATH"
# Colour codes and the terminal's width must not change what a test sees.
export NO_COLOR=1 COLUMNS=100

python="$VENV/bin/python"
[ -x "$python" ] || {
  echo "check.sh: no virtual environment at $VENV: run scripts/setup.sh test first" >&2
  exit 2
}

cpp_files() { git ls-files 'src/**/*.cc' 'src/**/*.h' 'src/*.cc' 'tests/cpp/**/*.cc' 'tests/cpp/**/*.h' 'benchmarks/**/*.cc'; }

# configure NAME EXTRA-CMAKE-ARGUMENTS…: a build folder of its own, warnings as errors.
configure() {
  local folder="$BUILD_ROOT/$1"
  shift
  local launcher=()
  command -v ccache >/dev/null && launcher=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
  cmake -S . -B "$folder" -G Ninja -DTM_BUILD_TESTS=ON -DPython_EXECUTABLE="$python" \
    -Dpybind11_DIR="$("$python" -m pybind11 --cmakedir)" "${launcher[@]}" "$@" >"$folder.log" 2>&1 ||
    { tail -n 20 "$folder.log"; return 1; }
}

step_ruff() { ruff check . && ruff format --check .; }

step_mypy() { mypy && mypy --strict --ignore-missing-imports scripts benchmarks/*.py; }

step_clang_format() { cpp_files | xargs -r clang-format --dry-run --Werror; }

step_sizes() { "$python" scripts/check_sizes.py; }

step_build() {
  configure release -DTM_BUILD_PYTHON=ON -DCMAKE_CXX_FLAGS=-Werror &&
    ninja -C "$BUILD_ROOT/release" -j "$JOBS" --quiet
}

step_ctest() { ctest --test-dir "$BUILD_ROOT/release" --output-on-failure -j "$JOBS" --timeout 300; }

step_pytest() {
  cp "$BUILD_ROOT"/release/_turbomind*.so lmdeploy/ && "$python" -m pytest -q --timeout 300
}

# Host files, those that differ from the main line first, until the budget is spent.
step_clang_tidy() {
  local deadline=$((SECONDS + TIDY_BUDGET_S)) left=0 failed=0 file files
  files=$( (git diff --name-only origin/main... -- 'src/*.cc' 2>/dev/null
    git ls-files 'src/**/*.cc' 'src/*.cc') | grep -v backend/cpu/isa/ | awk '!seen[$0]++')
  for file in $files; do
    [ -e "$file" ] || continue
    if [ "$SECONDS" -ge "$deadline" ]; then left=$((left + 1)); continue; fi
    clang-tidy -p "$BUILD_ROOT/release" --quiet --checks="$TIDY_CHECKS" --warnings-as-errors='*' \
      "$file" 2>/dev/null || failed=1
  done
  [ "$left" -gt 0 ] && echo "clang-tidy: $left files left out: the budget of $TIDY_BUDGET_S s is spent (TIDY_BUDGET_S)"
  return "$failed"
}

# run_sanitized NAME FLAGS FOLDERS: builds and runs the C++ tests of some folders.
run_sanitized() {
  local name="$1" flags="$2" folders="$3" folder="$BUILD_ROOT/$1" tests
  configure "$name" -DTM_BUILD_PYTHON=OFF -DTM_SANITIZE="$flags" -DCMAKE_BUILD_TYPE=None \
    -DCMAKE_CXX_FLAGS="-O1 -g1" || return 1
  tests=$(git ls-files 'tests/cpp/*_test.cc' | grep -E "tests/cpp/($folders)/" |
    xargs -r -n1 basename | sed 's/\.cc$//')
  [ -n "$tests" ] || { echo "no tests in tests/cpp/($folders)"; return 1; }
  # shellcheck disable=SC2086  # one word per target
  ninja -C "$folder" -j "$JOBS" --quiet $tests &&
    ctest --test-dir "$folder" --output-on-failure -j "$JOBS" --timeout 600 -R "^($folders)/"
}

step_asan() {
  ASAN_OPTIONS=detect_leaks=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
    run_sanitized asan address,undefined 'core|kv|ops|cpu|model|engine'
}

step_tsan() { TSAN_OPTIONS=halt_on_error=1 run_sanitized tsan thread 'core|engine'; }

step_wheel() {
  local folder="$BUILD_ROOT/wheel" wheel bytes
  rm -rf "$folder"
  CMAKE_ARGS="$(command -v ccache >/dev/null && echo -DCMAKE_CXX_COMPILER_LAUNCHER=ccache)" \
    "$python" -m pip wheel -q --no-deps --no-build-isolation -w "$folder" . || return 1
  wheel=$(ls "$folder"/*.whl) && bytes=$(stat -c %s "$wheel")
  echo "wheel: $(basename "$wheel"), $bytes bytes, at most $MAX_WHEEL_BYTES"
  [ "$bytes" -le "$MAX_WHEEL_BYTES" ]
}

readonly ALL_STEPS=(ruff mypy clang_format sizes build ctest pytest clang_tidy asan tsan wheel)
steps=("$@")
[ $# -gt 0 ] || steps=("${ALL_STEPS[@]}")
for step in "${steps[@]}"; do
  declare -F "step_$step" >/dev/null || {
    echo "check.sh: unknown step '$step': expected some of ${ALL_STEPS[*]}" >&2
    exit 2
  }
done

mkdir -p "$BUILD_ROOT"
summary=()
status=0
for step in "${steps[@]}"; do
  echo "== $step"
  begun=$SECONDS
  if "step_$step"; then verdict=ok; else verdict=FAILED status=1; fi
  summary+=("$(printf '%-14s %-7s %4d s' "$step" "$verdict" $((SECONDS - begun)))")
done
printf '\n== summary (%d s)\n' "$SECONDS"
printf '%s\n' "${summary[@]}"
exit "$status"
