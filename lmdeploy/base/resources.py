"""Cores, memory and CPU of the machine, within the limits of control groups (cgroups(7))."""

from __future__ import annotations

import os
import platform
from pathlib import PurePosixPath

_ROOT = "/sys/fs/cgroup"


def cpu_quota() -> float | None:
    """The least CPU quota of the group and those around it, in cores; None where there is none."""
    quotas = [_quota(read_kernel(f"{folder}/cpu.max")) for folder in _folders("")]
    for folder in _folders("cpu"):
        quota = read_kernel(f"{folder}/cpu.cfs_quota_us")
        period = read_kernel(f"{folder}/cpu.cfs_period_us")
        quotas.append(_quota(f"{quota} {period}"))
    return min((quota for quota in quotas if quota is not None), default=None)


def memory_left() -> int | None:
    """Bytes that the tightest of these groups still allows; None where none has a limit."""
    left = [
        _memory_left(folder, "memory.max", used="memory.current", prefix="")
        for folder in _folders("")
    ] + [
        _memory_left(folder, "memory.limit_in_bytes", used="memory.usage_in_bytes", prefix="total_")
        for folder in _folders("memory")
    ]
    return min((value for value in left if value is not None), default=None)


def _quota(text: str) -> float | None:
    # Version 2 says "max" and version 1 says -1 where there is none.
    words = text.split()
    if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]) > 0:
        return int(words[0]) / int(words[1])
    return None


def _memory_left(folder: str, limit: str, *, used: str, prefix: str) -> int | None:
    max_value = read_kernel(f"{folder}/{limit}").strip()
    taken = read_kernel(f"{folder}/{used}").strip()
    if not max_value.isdigit() or not taken.isdigit():
        return None
    # Cached pages of files are given back, those that were used lately too.
    names = (f"{prefix}inactive_file ", f"{prefix}active_file ")
    lines = read_kernel(f"{folder}/memory.stat").splitlines()
    cached = sum(int(line.split()[1]) for line in lines if line.startswith(names))
    return max(int(max_value) - int(taken) + cached, 0)


def _folders(controller: str) -> list[str]:
    """Our group of a controller of version 1, or of version 2 for "", and all groups around it.

    A container may see its own group as the root while its path is the host's: folders that are
    not there have no files.
    """
    # A group's name may hold whatever else ends lines in Python.
    for line in read_kernel("/proc/self/cgroup").split("\n"):
        _, _, rest = line.partition(":")
        controllers, found, path = rest.partition(":")
        if found and controller in controllers.split(","):
            root = f"{_ROOT}/{controller}" if controller else _ROOT
            group = PurePosixPath(path)
            return [root + str(folder).rstrip("/") for folder in (group, *group.parents)]
    return []


def read_kernel(path: str) -> str:
    """The text of a file of the kernel's, "" without it; what is no UTF-8 becomes surrogates."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError:
        return ""


def cpu_name() -> str:
    """Return the model name of the first core."""
    return cpu_info("model name") or platform.machine()


def cpu_info(key: str) -> str:
    """Return a line of /proc/cpuinfo for the first core, or "" if it has none."""
    for line in read_kernel("/proc/cpuinfo").splitlines():
        if line.startswith(key):
            return line.partition(":")[2].strip()
    return ""


def usable_cores() -> int:
    """Cores that this process may use: its affinity, cut by the cgroup's CPU quota."""
    cores = len(os.sched_getaffinity(0))
    quota = cpu_quota()
    return cores if quota is None else min(cores, max(1, int(-(-quota // 1))))


def free_memory_bytes() -> int:
    """Memory that may still be used: MemAvailable, cut by the cgroup's limit."""
    free = 0
    for line in read_kernel("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    if free == 0:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    left = memory_left()
    return free if left is None else min(free, left)
