"""Write o200k_base.tiktoken, the vocabulary of GPT-OSS, into a folder for openai-harmony.

    python scripts/dev/fetch_o200k.py [FOLDER]        default: share/lmdeploy of this environment

The file comes from the package litellm, which pip downloads and does not install. The tests compare
the rendering of GPT-OSS prompts with openai-harmony, which needs it.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "litellm==1.109.1"
# litellm keeps tiktoken's cache: files are named by the SHA-1 of the address they came from.
MEMBER = "litellm/litellm_core_utils/tokenizers/fb374d419588a4632f3f557e76b4b70aebbca790"
SHA256 = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"
NAME = "o200k_base.tiktoken"


def main(folder: Path) -> None:
    """Write the file. Its SHA-256 must match."""
    target = folder / NAME
    if not (target.is_file() and hashlib.sha256(target.read_bytes()).hexdigest() == SHA256):
        with tempfile.TemporaryDirectory() as scratch:
            command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
            command += ["download", "--no-deps", "--only-binary", ":all:", "-d", scratch, PACKAGE]
            subprocess.run(command, check=True)
            (wheel,) = Path(scratch).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                data = archive.read(MEMBER)
        if hashlib.sha256(data).hexdigest() != SHA256:
            raise ValueError(f"{MEMBER} in {wheel.name} does not have SHA-256 {SHA256}.")
        folder.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    print(target)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else f"{sys.prefix}/share/lmdeploy"))
    except (OSError, ValueError, KeyError, subprocess.CalledProcessError) as error:
        sys.exit(f"fetch_o200k.py: {error}")
