#!/usr/bin/env bash
# Writes two things that tests of chat formats need into share/lmdeploy of a Python environment: the
# vocabulary of GPT-OSS, and chat templates of models, which llama.cpp collects. They are in packages
# that pip downloads and does not install.
#
#   scripts/dev/fetch_test_files.sh PYTHON
set -uo pipefail

readonly PYTHON="$1" VOCABULARY=litellm==1.109.1 TEMPLATES=llama-cpp-python==0.3.36
# litellm keeps tiktoken's cache: files are named by the SHA-1 of the address they came from.
readonly MEMBER=litellm/litellm_core_utils/tokenizers/fb374d419588a4632f3f557e76b4b70aebbca790
readonly SHA256=446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d
folder="$("$PYTHON" -c 'import sys; print(sys.prefix)')/share/lmdeploy"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir -p "$folder/templates" || exit 1

download() { # download KIND PACKAGE==VERSION
  "$PYTHON" -m pip --disable-pip-version-check --quiet download --no-deps "$1" "${2%%==*}" -d "$scratch" "$2"
}
has_sum() { sha256sum --check --status <<<"$SHA256  $1" 2>/dev/null; }

status=0
has_sum "$folder/o200k_base.tiktoken" || {
  download --only-binary "$VOCABULARY" && "$PYTHON" -m zipfile -e "$scratch"/litellm-*.whl "$scratch" &&
    has_sum "$scratch/$MEMBER" && mv "$scratch/$MEMBER" "$folder/o200k_base.tiktoken"
} || status=1
[ "$(cat "$folder/templates/VERSION" 2>/dev/null)" = "$TEMPLATES" ] || {
  download --no-binary "$TEMPLATES" &&
    tar -xf "$scratch"/llama_cpp_python-*.tar.gz -C "$folder/templates" --strip-components=5 \
      --wildcards '*/vendor/llama.cpp/models/templates/*.jinja' &&
    echo "$TEMPLATES" >"$folder/templates/VERSION"
} || status=1
exit "$status"
