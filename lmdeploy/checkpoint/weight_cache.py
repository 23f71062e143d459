"""Packed weights kept on disk, so that the next start maps them instead of packing them again.

A folder holds one file per model. What it was packed from is told by the files'
path, size, inode, mtime and ctime, beside a hash of the config and of both ends of every tensor. A
hash of all contents would read a whole checkpoint before anything else happens. The ctime is set by
the kernel at every change of a file and, unlike the mtime, by nobody else. A file that changed so
shortly before it was read that a second change could have had the same ctime is not cached yet.

Nothing here may keep a model from being served: whatever goes wrong is a warning of one line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import importlib.util
import json
import logging
import mmap
import os
import re
import shutil
import stat
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lmdeploy.base.files import release_pages
from lmdeploy.checkpoint.open import Checkpoint
from lmdeploy.checkpoint.weight_cache_file import (
    VERSION,
    OtherKeyError,
    PackedFile,
    PackedFileError,
    Shape,
    Tiles,
    check_packed,
    file_bytes,
    read_packed,
    write_packed,
)
from lmdeploy.version import __version__

logger = logging.getLogger("lmdeploy")

SWITCH = "LMDEPLOY_CACHE"
FOLDER = "LMDEPLOY_CACHE_DIR"
LIMIT = "LMDEPLOY_CACHE_LIMIT"
# Timestamps of files are this coarse at worst (FAT; ext4 and others: 10 ms).
SETTLE_NS = 2_000_000_000
_DEFAULT_LIMIT = 20 * 10**9
_DEFAULT_SHARE = 0.1  # of the disk, where that is less
_KEEP_FREE = 1 << 30
_SUFFIX = ".packed"
_TEMPORARY = ".unfinished"
_STALE_SECONDS = 24 * 3600  # of unfinished files, whose writer was killed
_SAMPLE_BYTES = 4096
_START_SECONDS = 1.0  # from the engine's start to the write
_WAIT_SECONDS = 0.05
_BUSY_WAITS = 20  # between two pieces of a file while requests run
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


@dataclass(frozen=True)
class Source:
    """What tells the files of a checkpoint from later ones."""

    files: tuple[tuple[str, int, int, int, int], ...]  # path, size, inode, mtime, ctime
    seen_ns: int  # when they were looked at

    @property
    def settled(self) -> bool:
        """Whether a change that came after would have another ctime."""
        newest = max((ctime for *_, ctime in self.files), default=0)
        return newest + SETTLE_NS < self.seen_ns


@dataclass(frozen=True)
class CacheOptions:
    """Where packed weights are kept, and how many bytes of them."""

    folder: Path
    limit_bytes: int | None = None  # None: 20 GB or a tenth of the disk


def options_from_environment() -> CacheOptions | None:
    """What LMDEPLOY_CACHE, LMDEPLOY_CACHE_DIR and LMDEPLOY_CACHE_LIMIT ask for; None: no cache.

    Raises ValueError for values that mean nothing.
    """
    switch = os.environ.get(SWITCH, "") or "1"
    if switch not in ("0", "1"):
        raise ValueError(f"{SWITCH}: got {switch[:40]!r}, wanted 0 or 1")
    limit = _parse_size(os.environ.get(LIMIT, ""))
    if switch == "0" or limit == 0:
        return None
    named = os.environ.get(FOLDER, "")
    if named:
        return CacheOptions(Path(os.path.expanduser(named)).absolute(), limit)
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():
        base = Path(os.path.expanduser("~/.cache"))
    if not base.is_absolute():  # a user without a home
        return None
    return CacheOptions(base / "lmdeploy" / "packed", limit)


def _parse_size(text: str) -> int | None:
    if not text:
        return None
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) ?([KMGT]I?B|)", text.strip().upper())
    if match is None:
        raise ValueError(f"{LIMIT}: got {text[:40]!r}, wanted bytes, or a size such as 20GB")
    return int(float(match[1]) * _UNITS[match[2]])


def stamp_files(path: Path) -> Source:
    """The weight files of a resolved model. Taken before they are opened, and again before anything
    that was made of them is kept.
    """
    seen_ns = time.time_ns()
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors*"))  # the index too
    stamps = []
    for file in files:
        try:
            facts = file.stat()
            place = str(file.resolve())
        except (OSError, RuntimeError):  # a link to nowhere, or to itself: not a file to be read
            continue
        numbers = (facts.st_size, facts.st_ino, facts.st_mtime_ns, facts.st_ctime_ns)
        stamps.append((place, *numbers))
    return Source(tuple(stamps), seen_ns)


class CacheEntry:
    """The place of one model's packed weights. Nothing wrong with the cache is raised.

    Args:
        shapes: of every matrix that is kept, by name.
        source: the files, looked at before they were opened.
    """

    def __init__(
        self,
        options: CacheOptions,
        checkpoint: Checkpoint,
        *,
        shapes: Mapping[str, Shape],
        source: Source,
    ) -> None:
        from lmdeploy._turbomind import packed_layout_id

        self._options = options
        self._model = checkpoint.path
        self._layout = packed_layout_id
        self._source = source
        self._key = _key(source, _checkpoint_facts(checkpoint), layout=packed_layout_id)
        self._rejected: os.stat_result | None = None  # the file that `load` found damaged
        self.shapes = shapes
        self.name = _file_name(checkpoint.path)

    @property
    def path(self) -> Path:
        """The file, whether it is there or not."""
        return self._options.folder / self.name

    def load(self) -> PackedFile | None:
        """The mapped and checked file; None when the weights are to be packed."""
        try:
            with _open_folder(self._options.folder) as folder:
                return self._load_from(folder)
        except FileNotFoundError:
            return None
        except OtherKeyError as error:
            logger.info("cached weights %s: %s; packed anew", self.path, error)
        except (PackedFileError, OSError, ValueError, RuntimeError, MemoryError) as error:
            logger.warning("cached weights %s: %s; packed anew", self.path, _reason(error))
        return None

    def store(
        self, matrices: Mapping[str, Tiles], *, pause: Callable[[], None] = lambda: None
    ) -> bool:
        """Writes the file, the whole of it or nothing; whether it is there now.

        `pause` is called between pieces of the file; what it raises ends the write.
        """
        if not self._source.settled or self._has_changed():
            logger.info("%s has just changed: its weights are not cached yet", self._model)
            return False
        size = file_bytes(self.shapes)
        try:
            _make_folder(self._options.folder)
            with _open_folder(self._options.folder) as folder, _only_writer(folder, pause):
                if self._is_stored(folder):
                    return True
                if reason := _make_room(folder, self._options, size=size, keep=self.name):
                    logger.warning("weights are not cached in %s: %s", self._options.folder, reason)
                    return False
                with _new_file(folder, self.name, size=size) as fd:
                    write_packed(fd, matrices, key=self._key, layout=self._layout, pause=pause)
                    if self._has_changed():
                        return False
                    os.fsync(fd)
                    pause()
                    _publish(fd, folder, name=self.name)
        except OSError as error:
            logger.warning("weights are not cached in %s: %s", self._options.folder, _reason(error))
            return False
        return True

    def _map_from(self, folder: int) -> tuple[mmap.mmap, os.stat_result]:
        # Without waiting for what may be no file: a FIFO would never open.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        fd = os.open(self.name, flags, dir_fd=folder)
        try:
            facts = os.fstat(fd)
            if not stat.S_ISREG(facts.st_mode) or not _is_ours(facts):
                raise PackedFileError("not a file that this user alone may change")
            if facts.st_size == 0:
                raise PackedFileError("the file is empty")
            return mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ), facts
        finally:
            os.close(fd)

    def _load_from(self, folder: int) -> PackedFile:
        mapped, facts = self._map_from(folder)
        self._rejected = facts
        packed = read_packed(mapped, self.shapes, key=self._key, layout=self._layout)
        self._rejected = None
        with contextlib.suppress(OSError):  # the time of its last use
            os.utime(self.name, dir_fd=folder, follow_symlinks=False)
        return packed

    def _is_stored(self, folder: int) -> bool:
        """Whether another process has written the same meanwhile.

        Its tiles are not read: requests may be running, and the next start checks them.
        """
        try:
            mapped, facts = self._map_from(folder)
            check_packed(mapped, self.shapes, key=self._key, layout=self._layout)
        except (OSError, ValueError):
            return False
        return self._rejected is None or not os.path.samestat(facts, self._rejected)

    def _has_changed(self) -> bool:
        try:
            return stamp_files(self._model).files != self._source.files
        except OSError:
            return True


class CacheWriter:
    """Stores packed weights in a thread, piece by piece while no request runs.

    Not at a low priority: starved while it holds the interpreter's lock, it would stop every other
    thread. The process may end at any time: an unfinished file has no name.
    """

    def __init__(self, entry: CacheEntry, matrices: Mapping[str, Tiles]) -> None:
        self._entry = entry
        self._matrices: Mapping[str, Tiles] | None = matrices
        self._stopped = threading.Event()
        self._is_busy: Callable[[], bool] = lambda: False
        self._thread = threading.Thread(target=self._run, name="tm-cache", daemon=True)
        self.stored = False

    def start(self, *, is_busy: Callable[[], bool]) -> None:
        """Begins, once. `is_busy` says whether requests run."""
        self._is_busy = is_busy
        self._thread.start()

    def stop(self) -> None:
        """Ends the write soon; does not wait for it."""
        self._stopped.set()

    def join(self, timeout: float) -> bool:
        """Waits for the end; whether it has come."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        matrices, self._matrices = self._matrices, None
        assert matrices is not None
        self._stopped.wait(_START_SECONDS)
        try:
            self.stored = self._entry.store(matrices, pause=self._pause)
        except _StoppedError:
            logger.debug("the weights were not cached: the engine has been closed")
        except Exception as error:  # of the cache alone: requests go on
            logger.warning("the weights were not cached: %s", _reason(error))

    def _pause(self) -> None:
        # A server that is never idle still gets its file, at 2 MiB a second.
        for _ in range(_BUSY_WAITS):
            if self._stopped.is_set():
                raise _StoppedError
            if not self._is_busy():
                return
            self._stopped.wait(_WAIT_SECONDS)


class _StoppedError(Exception):
    pass


def _checkpoint_facts(checkpoint: Checkpoint) -> bytes:
    """A hash of the config, and of name, form and both ends of every tensor that is packed."""
    digest = hashlib.sha256()
    config = dataclasses.asdict(checkpoint.config)
    digest.update(json.dumps([checkpoint.family.name, config], sort_keys=True).encode())
    for planned in checkpoint.tensors:
        tensor = planned.tensor
        if planned.mapped:
            continue
        layout = [planned.interleaved_heads, planned.transposed]
        facts = [planned.name, tensor.format, list(tensor.shape), *layout]
        digest.update(json.dumps(facts).encode())
        digest.update(tensor.raw[:_SAMPLE_BYTES].data)
        digest.update(tensor.raw[-_SAMPLE_BYTES:].data)
        release_pages(tensor.raw)  # many more come with the few that are read
    return digest.digest()


def _key(source: Source, checkpoint_facts: bytes, *, layout: int) -> bytes:
    facts = [VERSION, layout, __version__, _build_facts(), source.files, checkpoint_facts.hex()]
    return hashlib.sha256(json.dumps(facts).encode()).digest()


def _build_facts() -> list[int]:
    """What changes when the code that converts and packs does, also between two releases."""
    from lmdeploy import _turbomind
    from lmdeploy.checkpoint import convert, gguf_blocks
    from lmdeploy.checkpoint import load as weight_loader
    from lmdeploy.checkpoint.methods import awq

    files = [m.__file__ for m in (_turbomind, awq, convert, gguf_blocks, weight_loader)]
    gguf = importlib.util.find_spec("gguf")  # converts K-quants; not imported where there are none
    if gguf is not None and gguf.origin is not None:
        files.append(os.path.join(os.path.dirname(gguf.origin), "quants.py"))
    # By content: installing the same build again changes their times alone.
    contents = [Path(file).read_bytes() for file in files if file and os.path.exists(file)]
    return [number for data in contents for number in (len(data), zlib.crc32(data))]


def _file_name(model: Path) -> str:
    place = hashlib.sha256(f"{__version__}\n{model.resolve()}".encode(errors="surrogateescape"))
    readable = re.sub(r"[^A-Za-z0-9._-]", "_", model.stem).lstrip(".")[:60]
    return f"{readable}-{place.hexdigest()[:16]}{_SUFFIX}"


def _reason(error: BaseException) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return (text.strip().splitlines() or [type(error).__name__])[0][:200]


def _is_ours(facts: os.stat_result) -> bool:
    """Whether nobody else (but root) can have put anything there."""
    return facts.st_uid == os.geteuid() and not facts.st_mode & 0o022


def _make_folder(folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)


@contextlib.contextmanager
def _open_folder(folder: Path) -> Iterator[int]:
    link = os.lstat(folder)
    if stat.S_ISLNK(link.st_mode) and link.st_uid not in (0, os.geteuid()):
        raise PermissionError(errno.EACCES, f"the folder is another user's link; {FOLDER}")
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if not _is_ours(os.fstat(fd)):
            raise PermissionError(
                errno.EACCES, f"the folder is another user's, or others may write to it; {FOLDER}"
            )
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _only_writer(folder: int, pause: Callable[[], None]) -> Iterator[None]:
    """Waits until no other process writes here: two would do the same work, or fill the disk."""
    while True:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            pause()
            time.sleep(_WAIT_SECONDS)
    try:
        yield
    finally:
        fcntl.flock(folder, fcntl.LOCK_UN)


def _make_room(folder: int, options: CacheOptions, *, size: int, keep: str) -> str:
    """Removes the files that were not used for the longest until `size` bytes fit.

    Returns why they would not fit then either, or nothing; in the first case no file has to go.
    """
    disk = shutil.disk_usage(folder)
    limit = options.limit_bytes
    if limit is None:
        limit = min(_DEFAULT_LIMIT, int(disk.total * _DEFAULT_SHARE))
    others = []
    for name in os.listdir(folder):
        facts = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if not stat.S_ISREG(facts.st_mode):
            continue
        if name.endswith(_TEMPORARY) and facts.st_mtime < time.time() - _STALE_SECONDS:
            os.unlink(name, dir_fd=folder)
        elif name.endswith(_SUFFIX) and name != keep:
            others.append((facts.st_mtime_ns, name, facts.st_size))
    if size > limit:
        return f"got {size} bytes, wanted at most {limit}; change {LIMIT}"
    no_room = f"got {size} bytes, wanted {_KEEP_FREE} to stay free on the disk; change {FOLDER}"
    others.sort(reverse=True)
    oldest: list[tuple[str, int]] = []
    while others and sum(each for *_, each in others) + size > limit:
        _, name, each = others.pop()
        oldest.append((name, each))
    free = shutil.disk_usage(folder).free + sum(each for _, each in oldest)
    if free < size + _KEEP_FREE:
        return no_room
    for name, _ in oldest:
        os.unlink(name, dir_fd=folder)
    # Who has them mapped keeps their space.
    return "" if shutil.disk_usage(folder).free >= size + _KEEP_FREE else no_room


@contextlib.contextmanager
def _new_file(folder: int, name: str, *, size: int) -> Iterator[int]:
    """A file without a name, where the file system has such; else one that goes if unfinished."""
    temporary = f".{name}.{os.getpid()}{_TEMPORARY}"
    flags = os.O_WRONLY | os.O_CLOEXEC
    try:
        fd = os.open(".", flags | os.O_TMPFILE, 0o600, dir_fd=folder)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
            raise
        with contextlib.suppress(FileNotFoundError):  # of a process that was killed: we alone write
            os.unlink(temporary, dir_fd=folder)
        fd = os.open(temporary, flags | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
    try:
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
        yield fd
    finally:
        os.close(fd)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=folder)


def _publish(fd: int, folder: int, *, name: str) -> None:
    """Gives the finished file its name, in place of an older one."""
    temporary = f".{name}.{os.getpid()}{_TEMPORARY}"
    if os.fstat(fd).st_nlink == 0:
        # linkat with both folders, so that the link of /proc is followed.
        os.link(f"/proc/self/fd/{fd}", temporary, src_dir_fd=folder, dst_dir_fd=folder)
    os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
