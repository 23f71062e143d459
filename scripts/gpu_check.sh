#!/usr/bin/env bash
# Everything that needs a GPU, in one command: are the kernels right, are they clean, how fast are
# they. A part is ended when its time is over, and runs even when an earlier one failed; figures and
# verdicts are in the file as soon as they are there. The summary names what failed, and the exit
# status is 1 then, 2 for what cannot be run, 3 where there is no GPU (or nothing to build with).
#
#   scripts/gpu_check.sh                       conformance to torch, at most 8 minutes after the build
#   scripts/gpu_check.sh conformance kernels   only these
#   scripts/gpu_check.sh build                 only build: about 2 minutes on 16 cores
#
#   conformance  every op in every mode on the GPU beside the CPU        (tests/cpp/cuda)
#   kernels      speed of every op, and the targets                      (benchmarks/bench_kernels.py)
#   generation   tokens per second, two models with random weights       (bench_generation.py)
#   memcheck, racecheck                 small tests under compute-sanitizer, where it is on PATH
#   torch        torch's attention on the same shapes, where it is installed       (peers_gpu.py)
#   peers        not by default: FlashInfer as well, which compiles for minutes, in 5 minutes at most
#
# TM_CUDA_BUILD    a folder with the programs built elsewhere (below); else build/cuda, built here
# TM_CUDA_ARCHS    what to build for (the GPU that is here)
# DOCTEST_INCLUDE  the folder of doctest/doctest.h, where it is in none that the compiler knows
# TM_GPU_RESULTS   where gpu_NAME.json goes (benchmarks/results; then docs/performance.md follows)
# TM_GPU_LOGS      where the whole output of every part goes (build/gpu_check)
# PYTHON           python3; nothing but the standard library is needed, torch for the peers
# SECONDS_conformance and so on: the time of a part
#
# To build on a machine without a GPU and carry the programs to one with the same processor and no
# older system libraries:
#
#   TM_CUDA_ARCHS=90a scripts/gpu_check.sh build
#   mkdir gpu && (cd build/cuda && cp gpu_ops_test device_bench generation_bench \
#     libturbomind_cuda.so ../../gpu)           # 30 MB; there: TM_CUDA_BUILD=gpu
set -uo pipefail
cd "$(dirname "$0")/.."

readonly DEFAULT_PARTS=(conformance kernels generation memcheck racecheck torch)
readonly ALL_PARTS=("${DEFAULT_PARTS[@]}" peers)
# With KILL_S for each of the default parts less than 480.
declare -rA LIMIT_S=(
  [conformance]="${SECONDS_conformance:-60}"
  [kernels]="${SECONDS_kernels:-110}"
  [generation]="${SECONDS_generation:-130}"
  [memcheck]="${SECONDS_memcheck:-50}"
  [racecheck]="${SECONDS_racecheck:-50}"
  [torch]="${SECONDS_torch:-40}"
  [peers]="${SECONDS_peers:-300}"
)
readonly NO_GPU=3 TIMED_OUT=124 KILLED=137
readonly KILL_S=5       # for a program that does not end when it is told to
readonly TO_END_S=10    # for a benchmark to say what it found, after its time
readonly START_S=60     # for the first program that uses the GPU
readonly ONE_FILE_S=30  # of tests: one that hangs leaves time for the others
readonly PEERS_S=60     # of measuring, for FlashInfer and torch together
readonly SANITIZER_FOUND=99
readonly LOGS="${TM_GPU_LOGS:-$PWD/build/gpu_check}"
readonly RESULTS="${TM_GPU_RESULTS:-$PWD/benchmarks/results}"
readonly PYTHON="${PYTHON:-python3}"
BUILD=$(realpath -m "${TM_CUDA_BUILD:-build/cuda}")
readonly BUILD
export PATH="$PATH:/usr/local/cuda/bin"

give_up() { # give_up STATUS WHY
  echo "gpu_check.sh: $2" >&2
  exit "$1"
}
no_gpu() { give_up "$NO_GPU" "$1; nothing was checked"; }

parts=("$@")
[ $# -gt 0 ] || parts=("${DEFAULT_PARTS[@]}")
case "${parts[0]}" in
  -h | --help)
    sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "scripts/${0##*/}"
    exit 0
    ;;
esac
for part in "${parts[@]}"; do
  [ "$part" = build ] || [ -n "${LIMIT_S[$part]:-}" ] ||
    give_up 2 "unknown part '$part': expected build or some of ${ALL_PARTS[*]}"
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
  local launchers=()
  command -v ccache >/dev/null &&
    launchers=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache -DCMAKE_CUDA_COMPILER_LAUNCHER=ccache)
  cmake -S . -B "$BUILD" -G Ninja -DCMAKE_BUILD_TYPE=Release -DTM_BUILD_TESTS=ON \
    -DTM_BUILD_PYTHON=OFF -DTM_CUDA=ON "-DTM_CUDA_ARCHS=${TM_CUDA_ARCHS:-$(gpu_arch)}" "${launchers[@]}" &&
    ninja -C "$BUILD" gpu_check
}

mkdir -p "$LOGS" "$RESULTS" || exit 2
if [ -z "${TM_CUDA_BUILD:-}" ]; then
  command -v nvidia-smi >/dev/null || [ -e /dev/nvidiactl ] || [ "${parts[*]}" = build ] ||
    no_gpu "no GPU: no NVIDIA driver found"
  command -v nvcc >/dev/null || [ -n "${CUDACXX:-}" ] ||
    no_gpu "no nvcc: install the CUDA toolkit, or name a built folder in TM_CUDA_BUILD"
  for tool in cmake ninja; do
    command -v "$tool" >/dev/null || give_up 2 "no $tool: pip install $tool, or set TM_CUDA_BUILD"
  done
  echo "== build in $BUILD"
  build >"$LOGS/build.log" 2>&1 || {
    tail -n 20 "$LOGS/build.log" >&2
    give_up 1 "the build failed: $LOGS/build.log"
  }
fi
[ "${parts[*]}" != build ] || exit 0
export LMDEPLOY_CUDA_LIBRARY="$BUILD/libturbomind_cuda.so"
for file in "$BUILD/device_bench" "$LMDEPLOY_CUDA_LIBRARY"; do
  [ -e "$file" ] || give_up 2 "no $file: build it (--help), or leave TM_CUDA_BUILD unset"
done

# Where cuBLASLt is, unless the loader knows: a toolkit, or a wheel of this Python.
cublas_folder() {
  local folders file
  folders=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' 2>/dev/null)
  for file in /usr/local/cuda/lib64/"$1" "$folders"/nvidia/*/lib/"$1"; do
    [ -e "$file" ] && dirname "$file" && return
  done
}
for name in libcublasLt.so.13 libcublasLt.so.12; do # as the library looks for them
  if /sbin/ldconfig -p 2>/dev/null | grep -q "$name"; then break; fi
  cublas=$(cublas_folder "$name")
  [ -z "$cublas" ] || break
done
readonly CUBLAS_PATH="${LD_LIBRARY_PATH:-}${cublas:+${LD_LIBRARY_PATH:+:}$cublas}"

device=$(timeout -k "$KILL_S" "$START_S" "$BUILD/device_bench" device=cuda </dev/null \
  2>"$LOGS/device.log")
case $? in
  0) ;;
  2) no_gpu "no GPU: $(tail -n 1 "$LOGS/device.log")" ;;
  "$TIMED_OUT" | "$KILLED") no_gpu "the GPU does not answer in $START_S s" ;;
  *) give_up 2 "$BUILD/device_bench does not run here: $(tail -n 1 "$LOGS/device.log")" ;;
esac
json="$RESULTS/$("$PYTHON" benchmarks/gpu_results.py <<<"$device")" || exit 2
echo "== $device"
[ -z "$CUBLAS_PATH" ] || echo "LD_LIBRARY_PATH=$CUBLAS_PATH"

# The files whose tests are in the program; fails where there are none.
test_names() {
  timeout "$START_S" "$BUILD/gpu_ops_test" --list-test-cases --reporters=xml "$@" |
    grep -oE '[a-z0-9_]+_test\.cc' | sort -u | grep .
}

# run_test LOG SECONDS NAME FILTER [COMMAND…]: tests of one file, under COMMAND.
run_test() {
  local log="$1" seconds="$2" name="$3" filter="$4"
  shift 4
  LD_LIBRARY_PATH="$CUBLAS_PATH" timeout -k "$KILL_S" "$seconds" "$@" \
    "$BUILD/gpu_ops_test" "--source-file=*/$name" $filter >"$log" 2>&1
}

# How many test cases ran, as doctest says at its end.
num_cases() { grep -oE 'test cases: +[0-9]+' "$1" | grep -oE '[0-9]+$' || echo 0; }

at_most() { echo $(($1 < $2 ? $1 : $2)); }

part_conformance() {
  local names name left log status=0 end=$((SECONDS + LIMIT_S[conformance]))
  names=$(test_names) || {
    echo "FAILED  no tests in $BUILD/gpu_ops_test"
    return 1
  }
  for name in $names; do
    log="$LOGS/$name.log"
    left=$(at_most "$ONE_FILE_S" $((end - SECONDS)))
    if [ "$left" -le 0 ]; then
      echo "FAILED  time over before $name"
      status=1
    elif run_test "$log" "$left" "$name" "" && [ "$(num_cases "$log")" -gt 0 ]; then
      echo "ok      $name, $(num_cases "$log") cases"
    else
      echo "FAILED  $name"
      tail -n 15 "$log"
      status=1
    fi
  done
  return "$status"
}

# sanitize TOOL: small tests. Not to come to an end in time is no failure, but for all of them.
sanitize() {
  local tool="$1" names name log code left cases=0 status=0
  local end=$((SECONDS + LIMIT_S[$tool]))
  command -v compute-sanitizer >/dev/null || {
    echo "skipped: no compute-sanitizer on PATH"
    return 0
  }
  names=$(test_names --test-suite=small) || {
    echo "FAILED  no small tests in $BUILD/gpu_ops_test"
    return 1
  }
  for name in $names; do
    log="$LOGS/$tool.$name.log"
    left=$((end - SECONDS))
    if [ "$left" -le 0 ]; then
      echo "time over before $name"
      continue
    fi
    run_test "$log" "$(at_most "$left" "$ONE_FILE_S")" "$name" --test-suite=small \
      compute-sanitizer --tool "$tool" --error-exitcode "$SANITIZER_FOUND"
    code=$?
    if [ "$code" != 0 ] && grep -iE '^=+ .*(not supported|unsupported)' "$log" | grep -qv 'Program hit'; then
      echo "skipped: compute-sanitizer cannot run here"
      return "$status"
    elif { [ "$code" = "$TIMED_OUT" ] || [ "$code" = "$KILLED" ]; } &&
      ! grep -qE '^=+ (Invalid|Error|ERROR|Race|Warning: Race)' "$log"; then
      echo "time over in $name, no error so far"
    elif [ "$code" != 0 ]; then
      echo "FAILED  $name ($code)"
      grep -E '^=+ ' "$log" | head -n 15
      status=1
    else
      echo "ok      $name, $(num_cases "$log") cases"
      cases=$((cases + $(num_cases "$log")))
    fi
  done
  echo "$cases cases without an error"
  if [ "$cases" = 0 ] && [ "$status" = 0 ]; then
    echo "FAILED  no test came to its end: give it more time (SECONDS_$tool)"
    status=1
  fi
  return "$status"
}
part_memcheck() { sanitize memcheck; }
part_racecheck() { sanitize racecheck; }

# limited PART COMMAND…: ends the command where it does not end itself.
limited() {
  local seconds="${LIMIT_S[$1]}" code
  shift
  timeout -k "$KILL_S" "$seconds" "$@"
  code=$?
  if [ "$code" = "$TIMED_OUT" ] || [ "$code" = "$KILLED" ]; then
    echo "time over: ended after $seconds s; what was measured by then is there"
  fi
  return "$code"
}

# measure PART SCRIPT PROGRAM
measure() {
  local budget=$((LIMIT_S[$1] - TO_END_S))
  LD_LIBRARY_PATH="$CUBLAS_PATH" limited "$1" "$PYTHON" "benchmarks/$2" --bench "$BUILD/$3" \
    --budget-s "$((budget > 0 ? budget : 0))" --json "$json"
}
part_kernels() { measure kernels bench_kernels.py device_bench; }
part_generation() { measure generation bench_generation.py generation_bench; }

# compare PART PEERS SECONDS
compare() {
  local code
  [ -e "$json" ] || {
    echo "skipped: nothing of ours was measured"
    return 0
  }
  limited "$1" "$PYTHON" benchmarks/peers_gpu.py --peers "$2" --budget-s "$3" --json "$json"
  code=$?
  case "$code" in
    "$NO_GPU") echo "skipped: no torch that uses the GPU" ;;
    "$TIMED_OUT" | "$KILLED") ;; # compiling takes as long as it takes
    *) return "$code" ;;
  esac
  return 0
}
part_torch() {
  compare torch torch "$((LIMIT_S[torch] > 2 * TO_END_S ? LIMIT_S[torch] - 2 * TO_END_S : 1))"
}
part_peers() { compare peers torch,flashinfer "$(at_most "$PEERS_S" "${LIMIT_S[peers]}")"; }

# note_checks NAME VERDICT SECONDS NOTE: into the file, for the case that a later part is the last.
note_checks() {
  printf '%s\t%s\t%d\t%s\n' "$@" >"$LOGS/part.tsv"
  "$PYTHON" benchmarks/gpu_results.py --checks "$LOGS/part.tsv" --json "$json" <<<"$device"
}

status=0 summary=()
for part in "${parts[@]}"; do
  [ "$part" != build ] || continue
  echo "== $part, at most ${LIMIT_S[$part]} s"
  begun=$SECONDS
  "part_$part" 2>&1 | tee "$LOGS/$part.log"
  if [ "${PIPESTATUS[0]}" = 0 ]; then verdict=ok; else verdict=FAILED status=1; fi
  [ "$verdict" = ok ] && grep -q '^skipped:' "$LOGS/$part.log" && verdict=skipped
  note=$(grep -E '^(FAILED|skipped:|time over)|is not installed' "$LOGS/$part.log" |
    head -n 1 | tr '\t' ' ')
  note_checks "$part" "$verdict" $((SECONDS - begun)) "$note" || status=1
  summary+=("$(printf '%-12s %-8s %4d s  %s' "$part" "$verdict" $((SECONDS - begun)) "$note")")
done
if [ "$RESULTS" = "$PWD/benchmarks/results" ]; then
  "$PYTHON" benchmarks/gpu_tables.py || status=1
fi
printf '\n== summary (%s)\n' "$json"
printf '%s\n' "${summary[@]}"
exit "$status"
