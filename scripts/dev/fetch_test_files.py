"""Write files that the tests of chat formats need into a folder.

    python scripts/dev/fetch_test_files.py [FOLDER]      default: share/lmdeploy of this environment

o200k_base.tiktoken   the vocabulary of GPT-OSS, with which openai-harmony renders prompts
templates/*.jinja     chat templates of models, which llama.cpp collects

They are in packages that pip downloads and does not install. For the second, which is a source
distribution, pip asks its build system for the metadata, but nothing is compiled.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

VOCABULARY_PACKAGE = "litellm==1.109.1"
# litellm keeps tiktoken's cache: files are named by the SHA-1 of the address they came from.
MEMBER = "litellm/litellm_core_utils/tokenizers/fb374d419588a4632f3f557e76b4b70aebbca790"
SHA256 = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"
VOCABULARY = "o200k_base.tiktoken"

TEMPLATES_PACKAGE = "llama-cpp-python==0.3.36"
TEMPLATES = "vendor/llama.cpp/models/templates"


def download(package: str, scratch: str, *, kind: str) -> Path:
    """Download a package of a kind, --only-binary or --no-binary, and return its file."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    command += ["download", "--no-deps", kind, package.split("==")[0], "-d", scratch, package]
    subprocess.run(command, check=True)
    (path,) = Path(scratch).iterdir()
    return path


def fetch_vocabulary(folder: Path) -> None:
    """Write the vocabulary. Its SHA-256 must match."""
    target = folder / VOCABULARY
    if not (target.is_file() and hashlib.sha256(target.read_bytes()).hexdigest() == SHA256):
        with tempfile.TemporaryDirectory() as scratch:
            wheel = download(VOCABULARY_PACKAGE, scratch, kind="--only-binary")
            with zipfile.ZipFile(wheel) as archive:
                data = archive.read(MEMBER)
        if hashlib.sha256(data).hexdigest() != SHA256:
            raise ValueError(f"{MEMBER} in {wheel.name} does not have SHA-256 {SHA256}.")
        target.write_bytes(data)
    print(target)


def fetch_templates(folder: Path) -> None:
    """Write the chat templates. The file VERSION says which package they come from."""
    target = folder / "templates"
    version = target / "VERSION"
    if not (version.is_file() and version.read_text() == TEMPLATES_PACKAGE):
        target.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory() as scratch:
            source = download(TEMPLATES_PACKAGE, scratch, kind="--no-binary")
            with tarfile.open(source) as archive:
                for member in archive:
                    path = Path(member.name)
                    data = (
                        archive.extractfile(member) if path.match(f"{TEMPLATES}/*.jinja") else None
                    )
                    if data is not None:
                        (target / path.name).write_bytes(data.read())
        version.write_text(TEMPLATES_PACKAGE)
    print(target)


def main(folder: Path) -> int:
    """Write all files that can be written. Return the number of failures."""
    folder.mkdir(parents=True, exist_ok=True)
    failures = 0
    for fetch in (fetch_vocabulary, fetch_templates):
        try:
            fetch(folder)
        except (OSError, ValueError, KeyError, subprocess.CalledProcessError) as error:
            print(f"fetch_test_files.py: {error}", file=sys.stderr)
            failures += 1
    return failures


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else f"{sys.prefix}/share/lmdeploy")))
