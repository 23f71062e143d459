"""Print where libkvx and its headers are: `python -m lmdeploy.kvx`."""

from __future__ import annotations

from lmdeploy.kvx import include_folder, library_path

if __name__ == "__main__":
    print(f"library: {library_path()}")
    print(f"include: {include_folder()}")
