"""The report on the environment and the warning of a namesake."""

from __future__ import annotations

import importlib
import sys
import warnings

import pytest

import lmdeploy
from lmdeploy import environment
from lmdeploy.cli.entrypoint import main


def test_report(capsys, tmp_path):
    path = tmp_path / "report.txt"
    assert main(["check_env", "--dump-file", str(path)]) == 0
    text = capsys.readouterr().out
    assert f"lmdeploy-fp4: {lmdeploy.__version__}" in text and "usable cores" in text
    assert path.read_text() == text


@pytest.fixture
def namesake(tmp_path, monkeypatch):
    folder = tmp_path / "lmdeploy-0.18.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: lmdeploy\nVersion: 0.18.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()


def test_namesake_is_named(namesake, capsys):
    with pytest.warns(RuntimeWarning, match=r"lmdeploy 0\.18\.0 is installed beside lmdeploy-fp4"):
        environment.warn_of_namesake()
    assert main(["check_env"]) == 0
    assert "WARNING: the distribution lmdeploy 0.18.0" in capsys.readouterr().out


def test_no_namesake_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        environment.warn_of_namesake()


def test_machine_facts():
    assert environment.usable_cores() >= 1
    assert environment.free_memory_bytes() > 1 << 20


def test_cached_pages_of_a_cgroup_count_as_free(monkeypatch):
    files = {
        "/proc/meminfo": "MemAvailable: 99999999 kB\n",
        "/sys/fs/cgroup/memory.max": "24000\n",
        "/sys/fs/cgroup/memory.current": "15000\n",
        "/sys/fs/cgroup/memory.stat": "anon 2000\ninactive_file 500\nactive_file 12500\n",
    }
    monkeypatch.setattr(environment, "_read", lambda path: files.get(path, ""))
    assert environment.free_memory_bytes() == 22000


def test_import_is_light():
    import subprocess

    code = "import sys, lmdeploy; print([m for m in ('torch', 'fastapi') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
