"""What is installed beside us, for the warning at import and for `lmdeploy check_env`."""

from __future__ import annotations

import os
import sys
import warnings

OURS = "lmdeploy-fp4"
NAMESAKE = "lmdeploy"


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution, None when it is absent."""
    import importlib.metadata

    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def namesake_warning() -> str | None:
    """A sentence when the distribution `lmdeploy` shares our import name in this environment."""
    # Asked at every import: the library that knows takes longer to import than this to look.
    version = installed_version(NAMESAKE) if _may_be_installed(NAMESAKE) else None
    if version is None:
        return None
    return (
        f"the distribution lmdeploy {version} is installed beside {OURS}: both own the import name "
        f"and the command lmdeploy; keep one of them, e.g. "
        f"pip uninstall lmdeploy && pip install --force-reinstall {OURS}"
    )


def _may_be_installed(distribution: str) -> bool:
    """Whether some folder of the path has metadata of that name, installed or unpacked."""
    beginnings = (f"{distribution}-", f"{distribution}.egg-info")
    for folder in sys.path:
        try:
            if any(name.lower().startswith(beginnings) for name in os.listdir(folder or ".")):
                return True
        except NotADirectoryError:
            return True  # an archive: let the library look into it
        except OSError:
            continue
    return False


def warn_of_namesake() -> None:
    """Warns once, at import."""
    text = namesake_warning()
    if text:
        warnings.warn(text, RuntimeWarning, stacklevel=3)


def usable_cores() -> int:
    """Cores that this process may use: its affinity, cut by the cgroup's CPU quota."""
    cores = len(os.sched_getaffinity(0))
    quota = cpu_quota()
    return cores if quota is None else min(cores, max(1, int(-(-quota // 1))))


def cpu_quota() -> float | None:
    """The cgroup's CPU quota in cores, None where there is none."""
    quota = _read("/sys/fs/cgroup/cpu.max").split()
    if len(quota) == 2 and quota[0].isdigit() and int(quota[1]) > 0:
        return int(quota[0]) / int(quota[1])
    return None


def free_memory_bytes() -> int:
    """Memory that may still be used: MemAvailable, cut by the cgroup's limit."""
    free = 0
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    if free == 0:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    if limit.isdigit():
        used = _read("/sys/fs/cgroup/memory.current").strip()
        # Cached pages of files are given back, those that were used lately too.
        cached = 0
        for line in _read("/sys/fs/cgroup/memory.stat").splitlines():
            if line.startswith(("inactive_file ", "active_file ")):
                cached += int(line.split()[1])
        free = min(free, int(limit) - int(used or 0) + cached)
    return max(free, 0)


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError:
        return ""
