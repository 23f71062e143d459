"""Tests of check_env and of the warning about an installed distribution named lmdeploy."""

from __future__ import annotations

import importlib
import re
import sys
import warnings

import pytest

import lmdeploy
from lmdeploy.base import installed, resources
from lmdeploy.cli import check_env
from lmdeploy.cli.main import main


def test_check_env_writes_report_to_terminal_and_file(capsys, tmp_path):
    path = tmp_path / "report.txt"
    assert main(["check_env", "--dump-file", str(path)]) == 0
    text = capsys.readouterr().out
    assert f"lmdeploy-fp4: {lmdeploy.__version__}" in text and "usable cores" in text
    assert path.read_text() == text


def test_cpu_device_line_names_the_isa_and_reports_an_unknown_one(capsys, monkeypatch):
    threads = resources.usable_cores()
    (line,) = check_env.cpu_device()
    assert re.match(rf"device: cpu \(\w+, {threads} threads?\); ", line)
    monkeypatch.setenv("LMDEPLOY_CPU_ISA", "scalar")
    assert next(check_env.cpu_device()).startswith("device: cpu (scalar")
    monkeypatch.setenv("LMDEPLOY_CPU_ISA", "neon")
    assert 'LMDEPLOY_CPU_ISA is "neon"' in next(check_env.cpu_device())
    assert main(["check_env"]) == 0
    assert "device: ERROR LMDEPLOY_CPU_ISA" in capsys.readouterr().out


@pytest.fixture
def set_files(monkeypatch):
    """Return a function that replaces the contents of the kernel's cgroup files."""

    def set_to(files):
        monkeypatch.setattr(resources, "read_kernel", lambda path: files.get(path, ""))

    return set_to


@pytest.mark.parametrize(
    ("written", "quota", "cores"),
    [("max 100000", None, 8), ("150000 100000", 1.5, 2), ("20000 100000", 0.2, 1), ("", None, 8)],
)
def test_usable_cores_are_limited_by_cgroup_quota(monkeypatch, set_files, written, quota, cores):
    files = {"/proc/self/cgroup": "0::/\n", "/sys/fs/cgroup/cpu.max": written}
    set_files(files)
    monkeypatch.setattr(resources.os, "sched_getaffinity", lambda pid: set(range(8)))
    assert resources.cpu_quota() == quota
    assert resources.usable_cores() == cores
    text = "no cgroup quota" if quota is None else f"cgroup quota {quota}"
    assert check_env.core_limits() == f"affinity 8 of {check_env.os.cpu_count()}, {text}"


@pytest.fixture
def namesake(tmp_path, monkeypatch):
    folder = tmp_path / "lmdeploy-0.18.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: lmdeploy\nVersion: 0.18.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()


def test_check_env_other_lmdeploy_distribution_is_reported(namesake, capsys):
    with pytest.warns(
        RuntimeWarning, match=r"lmdeploy 0\.18\.0 and lmdeploy-fp4 are both installed"
    ):
        installed.warn_of_namesake()
    assert main(["check_env"]) == 0
    assert "WARNING: The distributions lmdeploy 0.18.0" in capsys.readouterr().out


def test_warn_of_namesake_without_namesake_warns_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        installed.warn_of_namesake()


def test_resources_of_this_machine_are_plausible():
    assert resources.usable_cores() >= 1
    assert resources.free_memory_bytes() > 1 << 20


def test_free_memory_bytes_counts_cached_pages_of_the_cgroup(set_files):
    files = {
        "/proc/self/cgroup": "0::/\n",
        "/sys/fs/cgroup/memory.max": "24000\n",
        "/sys/fs/cgroup/memory.current": "15000\n",
        "/sys/fs/cgroup/memory.stat": "anon 2000\ninactive_file 500\nactive_file 12500\n",
    }
    set_files(files)
    assert resources.free_memory_bytes() == 22000


def test_resources_use_the_tightest_enclosing_cgroup(set_files):
    files = {
        "/proc/self/cgroup": "1:name=systemd:/a\n0::/system.slice/serve.service\n",
        "/sys/fs/cgroup/system.slice/serve.service/memory.max": "max\n",
        "/sys/fs/cgroup/system.slice/serve.service/memory.current": "100\n",
        "/sys/fs/cgroup/system.slice/serve.service/cpu.max": "300000 100000\n",
        "/sys/fs/cgroup/system.slice/memory.max": "9000\n",
        "/sys/fs/cgroup/system.slice/memory.current": "1000\n",
        "/sys/fs/cgroup/system.slice/cpu.max": "200000 100000\n",
    }
    set_files(files)
    assert (resources.memory_left(), resources.cpu_quota()) == (8000, 2.0)


def test_resources_read_cgroup_version_1(set_files):
    # These paths match a container that sees its own cgroup as the root.
    files = {
        "/proc/self/cgroup": "5:cpu,cpuacct:/docker/a\n4:memory:/docker/a\n0::/\n",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": "5000\n",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes": "6000\n",
        "/sys/fs/cgroup/memory/memory.stat": "inactive_file 1\ntotal_inactive_file 2500\n",
        "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "150000\n",
        "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    }
    set_files(files)
    assert (resources.memory_left(), resources.cpu_quota()) == (1500, 1.5)
    files["/sys/fs/cgroup/cpu/cpu.cfs_quota_us"] = "-1\n"
    files["/sys/fs/cgroup/memory/memory.limit_in_bytes"] = ""
    assert (resources.memory_left(), resources.cpu_quota()) == (None, None)


@pytest.mark.parametrize(
    ("lines", "quota"),
    [("0::/a\x0cb\n", 2.0), ("garbage\n0:x\n\n0::/a\x0cb", 2.0), ("::/\n", 3.0), ("", None)],
)
def test_cpu_quota_odd_cgroup_names_are_read_verbatim(set_files, lines, quota):
    files = {
        "/proc/self/cgroup": lines,
        "/sys/fs/cgroup/a\x0cb/cpu.max": "200000 100000\n",
        "/sys/fs/cgroup/cpu.max": "300000 100000\n",
    }
    set_files(files)
    assert resources.cpu_quota() == quota
    files["/sys/fs/cgroup/cpu.max"] = files["/sys/fs/cgroup/a\x0cb/cpu.max"] = "1 2 3\n"
    assert resources.cpu_quota() is None


def test_read_kernel_invalid_utf8_becomes_surrogate_escapes(tmp_path):
    path = tmp_path / "cgroup"
    path.write_bytes(b"0::/\xff\n")
    assert resources.read_kernel(str(path)) == "0::/\udcff\n"


def test_import_lmdeploy_loads_no_heavy_module():
    import subprocess

    heavy = ("torch", "starlette", "asyncio", "tokenizers")
    code = f"import sys, lmdeploy; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
