#!/usr/bin/env bash
# Everything that needs a GPU, in one command: are the kernels right, are they clean, how fast are
# they. Every part has a time of its own and runs even when an earlier one failed; the summary names
# what failed, and the exit status is 1 then, 3 where there is no GPU (or nothing to build with).
#
#   scripts/gpu_check.sh                       all parts, about 8 minutes after the build
#   scripts/gpu_check.sh conformance kernels   only these
#
#   conformance  every op in every mode on the GPU beside the CPU        (tests/cpp/cuda)
#   kernels      speed of every op, and the targets                      (benchmarks/bench_kernels.py)
#   generation   tokens per second, two models with random weights       (bench_generation.py)
#   memcheck, racecheck                       the same tests under compute-sanitizer
#   peers        FlashInfer and torch on the same shapes, if installed   (peers_gpu.py)
#
# TM_CUDA_BUILD   a folder with the programs built elsewhere; else they are built in build/cuda
# TM_GPU_RESULTS  where gpu_NAME.json goes (benchmarks/results; then docs/performance.md follows)
# TM_GPU_LOGS     where the whole output of every part goes (build/gpu_check)
# PYTHON          python3
# SECONDS_conformance and so on: the time of a part
set -uo pipefail
cd "$(dirname "$0")/.."

readonly ALL_PARTS=(conformance kernels generation memcheck racecheck peers)
declare -rA BUDGET_S=(
  [conformance]="${SECONDS_conformance:-60}"
  [kernels]="${SECONDS_kernels:-110}"
  [generation]="${SECONDS_generation:-150}"
  [memcheck]="${SECONDS_memcheck:-50}"
  [racecheck]="${SECONDS_racecheck:-50}"
  [peers]="${SECONDS_peers:-60}"
)
readonly NO_GPU=3 GRACE_S=15 TIMED_OUT=124 KILLED=137
readonly SANITIZER_FOUND=99
readonly BUILD="${TM_CUDA_BUILD:-$PWD/build/cuda}"
readonly RESULTS="${TM_GPU_RESULTS:-$PWD/benchmarks/results}"
readonly LOGS="${TM_GPU_LOGS:-$PWD/build/gpu_check}"
readonly PYTHON="${PYTHON:-python3}"
export PATH="$PATH:/usr/local/cuda/bin"

no_gpu() {
  echo "gpu_check.sh: $1; nothing was checked" >&2
  exit "$NO_GPU"
}

parts=("$@")
[ $# -gt 0 ] || parts=("${ALL_PARTS[@]}")
for part in "${parts[@]}"; do
  [ -n "${BUDGET_S[$part]:-}" ] || {
    echo "gpu_check.sh: unknown part '$part': expected some of ${ALL_PARTS[*]}" >&2
    exit 2
  }
done

# The architecture of the first GPU as nvcc names it: 9.0 is 90a, 10.0 and newer end in f.
gpu_arch() {
  local capability
  capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1)
  case "${capability/./}" in
    "") echo "80;86;89;90a" ;;
    90) echo "90a" ;;
    [1-9][0-9][0-9]) echo "${capability/./}f" ;;
    *) echo "${capability/./}" ;;
  esac
}

build() {
  local launcher=()
  command -v ccache >/dev/null && launcher=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
  cmake -S . -B "$BUILD" -G Ninja -DCMAKE_BUILD_TYPE=Release -DTM_BUILD_TESTS=ON \
    -DTM_BUILD_PYTHON=OFF -DTM_CUDA=ON "-DTM_CUDA_ARCHS=$(gpu_arch)" "${launcher[@]}" &&
    ninja -C "$BUILD" gpu_check
}

if [ -z "${TM_CUDA_BUILD:-}" ]; then
  command -v nvidia-smi >/dev/null || [ -e /dev/nvidiactl ] ||
    no_gpu "no GPU: no NVIDIA driver found"
  command -v nvcc >/dev/null || [ -n "${CUDACXX:-}" ] ||
    no_gpu "no nvcc: install the CUDA toolkit, or name a built folder in TM_CUDA_BUILD"
  echo "== build in $BUILD"
  mkdir -p "$LOGS"
  build >"$LOGS/build.log" 2>&1 || {
    tail -n 20 "$LOGS/build.log" >&2
    echo "gpu_check.sh: the build failed: $LOGS/build.log" >&2
    exit 1
  }
fi
mkdir -p "$LOGS" "$RESULTS"
export LMDEPLOY_CUDA_LIBRARY="$BUILD/libturbomind_cuda.so"

device=$("$BUILD/device_bench" device=cuda </dev/null 2>"$LOGS/device.log") ||
  no_gpu "no GPU: $(tail -n 1 "$LOGS/device.log")"
json="$RESULTS/$("$PYTHON" benchmarks/gpu_results.py <<<"$device")" || exit 2
echo "== $device"

# The files whose tests are in the program; fails where there are none.
test_names() {
  "$BUILD/gpu_ops_test" --list-test-cases --reporters=xml | grep -oE '[a-z0-9_]+_test\.cc' |
    sort -u | grep .
}

# run_test LOG SECONDS NAME [COMMAND…]: one test file, under COMMAND.
run_test() {
  local log="$1" seconds="$2" name="$3"
  shift 3
  timeout -k 5 "$seconds" "$@" "$BUILD/gpu_ops_test" "--source-file=*/$name" >"$log" 2>&1
}

part_conformance() {
  local names name status=0 end=$((SECONDS + ${BUDGET_S[conformance]}))
  names=$(test_names) || {
    echo "FAILED  no tests in $BUILD/gpu_ops_test"
    return 1
  }
  for name in $names; do
    if run_test "$LOGS/$name.log" "$((end > SECONDS ? end - SECONDS : 1))" "$name" &&
      grep -qE 'test cases: +[1-9]' "$LOGS/$name.log"; then
      echo "ok      $name"
    else
      echo "FAILED  $name"
      tail -n 15 "$LOGS/$name.log"
      status=1
    fi
  done
  return "$status"
}

# sanitize TOOL: no error in what the time allows is no failure; it is said.
sanitize() {
  local tool="$1" names name status=0 code left
  local end=$((SECONDS + ${BUDGET_S[$tool]}))
  command -v compute-sanitizer >/dev/null || {
    echo "skipped: no compute-sanitizer on PATH"
    return 0
  }
  names=$(test_names) || {
    echo "FAILED  no tests in $BUILD/gpu_ops_test"
    return 1
  }
  for name in $names; do
    left=$((end - SECONDS))
    if [ "$left" -le 0 ]; then
      echo "time over before $name"
      continue
    fi
    run_test "$LOGS/$tool.$name.log" "$left" "$name" compute-sanitizer --tool "$tool" \
      --error-exitcode "$SANITIZER_FOUND"
    code=$?
    if grep -qiE '^=+ .*(not supported|unsupported)' "$LOGS/$tool.$name.log"; then
      echo "skipped: compute-sanitizer cannot run here"
      return 0
    elif { [ "$code" = "$TIMED_OUT" ] || [ "$code" = "$KILLED" ]; } && ! grep -qE '^=+ (Invalid|Error|ERROR|Race|Warning: Race)' \
      "$LOGS/$tool.$name.log"; then
      echo "time over in $name, no error so far"
    elif [ "$code" != 0 ]; then
      echo "FAILED  $name ($code)"
      grep -E '^=+ ' "$LOGS/$tool.$name.log" | head -n 15
      status=1
    else
      echo "ok      $name"
    fi
  done
  return "$status"
}
part_memcheck() { sanitize memcheck; }
part_racecheck() { sanitize racecheck; }

# limited PART COMMAND…: the command keeps its own time; this ends it where it does not.
limited() {
  local seconds="${BUDGET_S[$1]}"
  shift
  timeout -k 5 "$((seconds + GRACE_S))" "$@"
}
part_kernels() {
  limited kernels "$PYTHON" benchmarks/bench_kernels.py --bench "$BUILD/device_bench" \
    --budget-s "${BUDGET_S[kernels]}" --json "$json"
}
part_generation() {
  limited generation "$PYTHON" benchmarks/bench_generation.py --bench "$BUILD/generation_bench" \
    --budget-s "${BUDGET_S[generation]}" --json "$json"
}
part_peers() {
  [ -e "$json" ] || {
    echo "skipped: nothing of ours was measured"
    return 0
  }
  limited peers "$PYTHON" benchmarks/peers_gpu.py --budget-s "${BUDGET_S[peers]}" --json "$json"
  local code=$?
  [ "$code" = "$NO_GPU" ] && return 0 # it said why
  return "$code"
}

status=0 summary=()
: >"$LOGS/parts.tsv"
for part in "${parts[@]}"; do
  echo "== $part, ${BUDGET_S[$part]} s"
  begun=$SECONDS
  "part_$part" 2>&1 | tee "$LOGS/$part.log"
  if [ "${PIPESTATUS[0]}" = 0 ]; then verdict=ok; else verdict=FAILED status=1; fi
  [ "$verdict" = ok ] && grep -q '^skipped' "$LOGS/$part.log" && verdict=skipped
  note=$(grep -E '^(FAILED|skipped|time over)' "$LOGS/$part.log" | head -n 1 | tr '\t' ' ')
  printf '%s\t%s\t%d\t%s\n' "$part" "$verdict" $((SECONDS - begun)) "$note" >>"$LOGS/parts.tsv"
  summary+=("$(printf '%-12s %-8s %4d s  %s' "$part" "$verdict" $((SECONDS - begun)) "$note")")
done
"$PYTHON" benchmarks/gpu_results.py --checks "$LOGS/parts.tsv" --json "$json" <<<"$device" ||
  status=1
if [ "$RESULTS" = "$PWD/benchmarks/results" ]; then
  "$PYTHON" benchmarks/gpu_tables.py || status=1
fi
printf '\n== summary (%s)\n' "$json"
printf '%s\n' "${summary[@]}"
exit "$status"
