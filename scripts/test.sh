#!/usr/bin/env bash
# Everything from nothing: system packages where this may install them, a virtual environment, a
# build, and all checks (scripts/check.sh). Arguments go to check.sh.
set -euo pipefail
cd "$(dirname "$0")/.."
started=$SECONDS

missing=()
need() { # need COMMAND-OR-HEADER PACKAGE
  command -v "$1" >/dev/null || [ -e "/usr/include/$1" ] || missing+=("$2")
}
need git git
need g++ g++
need cmake cmake
need ninja ninja-build
need ccache ccache
need clang-format clang-format
need doctest/doctest.h doctest-dev
need valgrind/callgrind.h valgrind
need chromium chromium # tests of the web page
need redis-server redis-server # tests of the KV store
python3 -c 'import venv, ensurepip' 2>/dev/null || missing+=(python3-venv)
[ -e "$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ] ||
  missing+=(python3-dev)
if [ "${#missing[@]}" -gt 0 ]; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "== installing system packages: ${missing[*]}"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "${missing[@]}"
  else
    echo "test.sh: missing: ${missing[*]}; install them, e.g. sudo apt-get install ${missing[*]}" >&2
    exit 1
  fi
fi

scripts/setup.sh test
echo "== set up in $((SECONDS - started)) s"
exec scripts/check.sh "$@"
