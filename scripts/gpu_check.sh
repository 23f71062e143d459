#!/usr/bin/env bash
# Runs everything that needs a GPU: conformance tests, benchmarks and memory checks. After a part that
# fails or exceeds its time, the next part runs. The summary lists the parts. The exit status is 0, 1
# if a part failed, 2 for wrong arguments or missing tools, and 3 if there is no GPU.
#
#   scripts/gpu_check.sh build models          only builds, and makes the models (16 and 14 GB)
#   scripts/gpu_check.sh                       runs all parts, in at most 6 minutes after the build
#   scripts/gpu_check.sh conformance kernels   runs only these parts
#
#   conformance  compares every op in every mode on the GPU with the CPU, and runs libkvx on memory of
#                the GPU                                       (gpu_ops_test, kvx_device_c, kvx_device_cpp)
#   tuner        prints the kernels that this GPU is fastest with, as rows to commit (bench_gpu.py tuner)
#   kernels      measures the speed of every op                              (bench_gpu.py device)
#   baselines    measures cuBLAS, cuDNN, FlashAttention 2, XQA and FlashInfer on the same cells
#                (bench_gpu.py baselines)
#   generation   measures tokens per second of two models       (bench_engine.py --device cuda)
#   server       measures a server with 64 streams              (bench_server.py --device cuda)
#   memcheck, racecheck   run small tests under compute-sanitizer, if it is on PATH
#
# A part that runs only if it is named:
#   python       serves tiny models, compares their scores with those of the CPU, and moves KV blocks
#                (pytest; needs the packages of the extra test)
#
# `python docs/gpu_tables.py FILE` makes the tables of docs/gpu.md from the results.
#
# TM_CUDA_BUILD    a folder with programs that were built elsewhere; by default build/cuda is built
# TM_CUDA_ARCHS    architectures to build for; default: that of the first GPU
# TM_GPU_RESULTS   the folder for gpu_NAME.jsonl and tuner_NAME.jsonl; default benchmarks/results
# TM_GPU_LOGS      the folder for the output of every part; default build/gpu_check
# TM_GPU_MODELS    the folder for random models; default build/gpu_models
# PYTHON           default python3; generation and server need lmdeploy of this tree, the baselines need
#                  torch and flashinfer-python
# SECONDS_conformance and so on: the time limit of a part. FlashInfer compiles its kernels when they
# are first used: set SECONDS_baselines=1200 in the first run.
#
# To build on a machine without a GPU, set TM_CUDA_ARCHS=90a, run the part `build`, and copy
# gpu_ops_test, kvx_device_c, kvx_device_cpp, device_bench, libkvx.so.1 and libturbomind_cuda.so from
# build/cuda.
set -uo pipefail
cd "$(dirname "$0")/.."

readonly PARTS=(conformance tuner kernels baselines generation server memcheck racecheck)
declare -rA LIMIT_S=( # 6 minutes without python
  [conformance]="${SECONDS_conformance:-40}" [tuner]="${SECONDS_tuner:-40}" [kernels]="${SECONDS_kernels:-60}"
  [baselines]="${SECONDS_baselines:-60}" [generation]="${SECONDS_generation:-80}"
  [server]="${SECONDS_server:-30}" [memcheck]="${SECONDS_memcheck:-25}"
  [racecheck]="${SECONDS_racecheck:-25}" [python]="${SECONDS_python:-120}"
)
# The models, and the KV formats that are measured with them.
declare -rA MODELS=([llama-3-8b]=none,nvfp4 [gpt-oss-20b]=none,mxfp4)
readonly SERVED_MODEL=llama-3-8b NUM_STREAMS=64 NUM_PROCESSES=13
readonly NO_GPU=3 SANITIZER_FOUND=99
readonly PYTHON="${PYTHON:-python3}"
RESULTS=$(realpath -m "${TM_GPU_RESULTS:-benchmarks/results}")
LOGS=$(realpath -m "${TM_GPU_LOGS:-build/gpu_check}")
MODEL_FOLDER=$(realpath -m "${TM_GPU_MODELS:-build/gpu_models}")
BUILD=$(realpath -m "${TM_CUDA_BUILD:-build/cuda}")
export PATH="$PATH:/usr/local/cuda/bin"

give_up() { # give_up STATUS WHY
  echo "gpu_check.sh: $2" >&2
  exit "$1"
}

# Prints the architecture of the first GPU as nvcc names it: 9.0 is 90a, 10.0 and newer end in f.
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

# Adds the folder of cuBLASLt to LD_LIBRARY_PATH, unless the loader finds it.
find_cublas() {
  local packages name file
  packages=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' 2>/dev/null)
  for name in libcublasLt.so.13 libcublasLt.so.12; do # in the order of the CUDA library
    /sbin/ldconfig -p 2>/dev/null | grep -q "$name" && return
    for file in /usr/local/cuda/lib64/"$name" "$packages"/nvidia/*/lib/"$name"; do
      [ -e "$file" ] || continue
      export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$(dirname "$file")"
      return
    done
  done
}

# Makes the models that are missing.
make_models() {
  local model
  for model in "${!MODELS[@]}"; do
    [ ! -e "$MODEL_FOLDER/$model" ] || continue
    echo "== makes $MODEL_FOLDER/$model"
    rm -rf "$MODEL_FOLDER/$model.part"
    mkdir -p "$MODEL_FOLDER" &&
      "$PYTHON" benchmarks/make_random_checkpoint.py "$model" "$MODEL_FOLDER/$model.part" &&
      mv "$MODEL_FOLDER/$model.part" "$MODEL_FOLDER/$model" || return 1
  done
}

# Runs libkvx on memory of the GPU, in C and C++.
check_kvx() {
  local name code=0
  for name in kvx_device_c kvx_device_cpp; do
    LD_LIBRARY_PATH="$BUILD${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" timeout -k 5 20 "$BUILD/$name" || {
      code=$?
      echo "FAILED  $name ($code)"
    }
  done
  return "$((code != 0))"
}

# Runs the test cases in several processes, each with its share.
part_conformance() {
  local count share first pids=() code=0 kvx=0
  check_kvx || kvx=1
  count=$("$BUILD/gpu_ops_test" --count | sed -nE 's/.*filters: ([0-9]+).*/\1/p')
  [ "${count:-0}" -gt 0 ] || { echo "FAILED  gpu_ops_test lists no test cases"; return 1; }
  share=$(((count + NUM_PROCESSES - 1) / NUM_PROCESSES))
  for ((first = 1; first <= count; first += share)); do
    timeout -k 5 "${LIMIT_S[conformance]}" "$BUILD/gpu_ops_test" "--first=$first" \
      "--last=$((first + share - 1))" >"$LOGS/conformance.$first.log" 2>&1 &
    pids+=("$!")
  done
  for ((first = 1; first <= count; first += share)); do
    wait "${pids[(first - 1) / share]}" || code=$?
    cat "$LOGS/conformance.$first.log"
    grep -qE 'test cases: +[1-9]' "$LOGS/conformance.$first.log" || code=$((code == 0 ? 1 : code))
  done
  [ "$code" = 0 ] || echo "FAILED  gpu_ops_test ($code)"
  return "$((code != 0 || kvx != 0))"
}

# sanitize TOOL: runs the small tests. Exceeding the time is no failure if no error was found before.
sanitize() {
  local code
  command -v compute-sanitizer >/dev/null || {
    echo "skipped: no compute-sanitizer on PATH"
    return 0
  }
  timeout -k 5 "$((LIMIT_S[$1] - 5))" compute-sanitizer --tool "$1" \
    --error-exitcode "$SANITIZER_FOUND" "$BUILD/gpu_ops_test" --test-suite=small \
    2>&1 | tee "$LOGS/$1.tool.log"
  code=${PIPESTATUS[0]}
  if [ "$code" = 124 ] || [ "$code" = 137 ]; then
    code=0
    echo "the time is over"
    ! grep -qE '^=+ (Invalid|Error|ERROR|Race|Warning: Race)' "$LOGS/$1.tool.log" || code=1
  elif [ "$code" != 0 ] && grep -qiE '^=+ .*(not supported|unsupported)' "$LOGS/$1.tool.log"; then
    echo "skipped: compute-sanitizer cannot run here"
    code=0
  elif [ "$code" = 0 ]; then
    # A run without test cases checks nothing.
    grep -qE 'test cases: +[1-9]' "$LOGS/$1.tool.log" || code=1
  fi
  [ "$code" = 0 ] || echo "FAILED  $1"
  return "$((code != 0))"
}
part_memcheck() { sanitize memcheck; }
part_racecheck() { sanitize racecheck; }

bench() { # bench PART FILE ARGUMENTS…
  local budget=$((LIMIT_S[$1] - 10))
  timeout -k 5 "${LIMIT_S[$1]}" "$PYTHON" benchmarks/bench_gpu.py "${@:3}" --json "$2" \
    --budget-s "$((budget > 0 ? budget : 0))"
}
part_tuner() { bench tuner "$RESULTS/tuner_$name.jsonl" tuner --bench "$BUILD/device_bench"; }
part_kernels() { bench kernels "$json" device --bench "$BUILD/device_bench"; }
# Prints why a model cannot be measured, if that is so.
model_is_missing() {
  if [ ! -d "$MODEL_FOLDER/$1" ]; then
    echo "skipped: no $MODEL_FOLDER/$1; scripts/gpu_check.sh models makes it"
  elif ! "$PYTHON" -c 'import lmdeploy._turbomind' 2>/dev/null; then
    echo "skipped: $PYTHON cannot import lmdeploy"
  else
    return 1
  fi
}
part_generation() {
  local model code=0
  for model in "${!MODELS[@]}"; do
    model_is_missing "$model" && continue
    timeout -k 5 "$((LIMIT_S[generation] / ${#MODELS[@]}))" "$PYTHON" benchmarks/bench_engine.py \
      --device cuda --model "$MODEL_FOLDER/$model" --modes "${MODELS[$model]}" --contexts 1024 \
      --batches 1,32,128 --steps 64 --repeats 1 --machine "$machine" --json "$json" || {
      code=$?
      echo "FAILED  $model ($code)"
    }
  done
  return "$((code != 0))"
}
part_server() {
  model_is_missing "$SERVED_MODEL" && return
  timeout -k 5 "${LIMIT_S[server]}" "$PYTHON" benchmarks/bench_server.py --device cuda \
    --model "$MODEL_FOLDER/$SERVED_MODEL" --clients "$NUM_STREAMS" --repeats 1 \
    --machine "$machine" --json "$json" || {
    echo "FAILED  the server ($?)"
    return 1
  }
}
part_python() {
  LMDEPLOY_TEST_CUDA="$LMDEPLOY_CUDA_LIBRARY" timeout -k 5 "${LIMIT_S[python]}" "$PYTHON" -m pytest \
    -p no:cacheprovider -rA --tb=short tests/python/gpu tests/python/kv_store/test_engine.py \
    tests/python/engine/test_speculation.py
}
part_baselines() {
  [ -e "$json" ] || { echo "skipped: there are no rows of our kernels"; return 0; }
  bench baselines "$json" baselines
  local code=$?
  [ "$code" != "$NO_GPU" ] || { echo "skipped: no torch that uses the GPU"; return 0; }
  return "$code"
}

parts=("$@")
[ $# -gt 0 ] || parts=("${PARTS[@]}")
case "${parts[0]}" in
  -h | --help) sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' scripts/gpu_check.sh && exit 0 ;;
esac
needs_gpu=""
for part in "${parts[@]}"; do
  case "$part" in
    build | models) continue ;;
  esac
  [ -n "${LIMIT_S[$part]:-}" ] ||
    give_up 2 "part '$part' is unknown; choose build, models, python or some of ${PARTS[*]}"
  needs_gpu=yes
done

if [ -n "${TM_CUDA_BUILD:-}" ] && [[ " ${parts[*]} " == *" build "* ]]; then
  give_up 2 "TM_CUDA_BUILD names programs that are built; unset it to build in build/cuda"
fi
mkdir -p "$LOGS" "$RESULTS" || exit 2
if [[ " ${parts[*]} " == *" models "* ]]; then
  make_models || give_up 1 "the models could not be made"
fi
if [ -z "${TM_CUDA_BUILD:-}" ] && [ "${parts[*]}" != models ]; then
  command -v nvidia-smi >/dev/null || [ -e /dev/nvidiactl ] || [ -z "$needs_gpu" ] ||
    give_up "$NO_GPU" "no GPU: no NVIDIA driver found; nothing was checked"
  command -v nvcc >/dev/null || [ -n "${CUDACXX:-}" ] ||
    give_up "$NO_GPU" "no nvcc: install the CUDA toolkit, or set TM_CUDA_BUILD"
  echo "== build in $BUILD"
  build >"$LOGS/build.log" 2>&1 || {
    tail -n 20 "$LOGS/build.log" >&2
    give_up 1 "the build failed: $LOGS/build.log"
  }
fi
[ -n "$needs_gpu" ] || exit 0
export LMDEPLOY_CUDA_LIBRARY="$BUILD/libturbomind_cuda.so"
for file in "$BUILD/device_bench" "$LMDEPLOY_CUDA_LIBRARY"; do
  [ -e "$file" ] || give_up 2 "no $file: build it (--help), or leave TM_CUDA_BUILD unset"
done
find_cublas
device=$(timeout -k 5 60 "$BUILD/device_bench" device=cuda </dev/null 2>"$LOGS/device.log") ||
  give_up "$NO_GPU" "no GPU: device_bench says: $(tail -n 1 "$LOGS/device.log")"
echo "== $device"
name=$(sed -E 's/.*"device": "([^"]*)".*/\L\1/; s/[^a-z0-9]+/_/g; s/^_|_$//g' <<<"$device")
readonly json="$RESULTS/gpu_$name.jsonl"
machine=$("$PYTHON" benchmarks/bench_gpu.py machine --bench "$BUILD/device_bench") ||
  give_up "$NO_GPU" "$PYTHON cannot run benchmarks/bench_gpu.py"

status=0 summary=()
for part in "${parts[@]}"; do
  [ "$part" != build ] && [ "$part" != models ] || continue
  echo "== $part, at most ${LIMIT_S[$part]} s"
  begun=$SECONDS
  "part_$part" 2>&1 | tee "$LOGS/$part.log"
  if [ "${PIPESTATUS[0]}" = 0 ]; then verdict=ok; else verdict=FAILED status=1; fi
  [ "$verdict" = ok ] && grep -q '^skipped:' "$LOGS/$part.log" && verdict=skipped
  note=$(grep -E '^(FAILED|skipped:|not measured:)|the time is over' "$LOGS/$part.log" | head -n 1)
  summary+=("$(printf '%-12s %-8s %4d s  %s' "$part" "$verdict" $((SECONDS - begun)) "$note")")
done
printf '\n== summary (%s)\n' "$json"
printf '%s\n' "${summary[@]}"
exit "$status"
