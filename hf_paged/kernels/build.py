"""Finds, or compiles and caches, the C++ library behind :mod:`hf_paged.kernels.cpu`.

Nothing happens at import. :func:`load` looks, in this order, for

1. a library that a distributor put next to this module (:func:`build_prebuilt`), compiled for this CPU's instructions,
2. a library compiled earlier on this machine, in a folder private to the user,
3. a C++ compiler, and compiles ``csrc/paged_attention.cpp`` with it (a few seconds, once),
4. such a library for any CPU of this architecture (slow, but needs nothing).

The project's own wheels hold the sources only.

The cached file's name holds a hash of everything that can change the result: sources, flags, compiler version and CPU
features. Loading a library runs its code, so a cache folder or file that another user could have written is refused.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["ABI_VERSION", "KernelUnavailable", "build_prebuilt", "cache_folder", "load"]

logger = logging.getLogger(__name__)

ABI_VERSION = 1
"""What ``hf_paged_abi_version()`` of a usable library returns: raised with every change of a C signature."""

_HERE = Path(__file__).resolve().parent
_SOURCES = _HERE.parent / "csrc"
_MAIN_SOURCE = "paged_attention.cpp"
_TIMEOUT = 300.0  # seconds a compiler may take before it counts as broken
_ERROR_TAIL = 2000  # characters of the compiler's output that an error quotes

_BASE_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-fvisibility=hidden", "-w")
# Tried in turn: Apple's clang refuses -fopenmp, some compilers and architectures refuse -march=native.
_OPTIONAL_FLAGS = (("-march=native", "-fopenmp"), ("-fopenmp",), ("-march=native",), ())

# Shipped variants, best first: name -> (flags, CPU features as Linux names them).
_X86_V3 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe"})
_X86_V4 = _X86_V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_VARIANTS: dict[str, tuple[tuple[str, ...], frozenset[str]]] = {
    "x86-64-v4-bf16": (("-march=x86-64-v4", "-mavx512bf16"), _X86_V4 | {"avx512_bf16"}),
    "x86-64-v4": (("-march=x86-64-v4",), _X86_V4),
    "x86-64-v3": (("-march=x86-64-v3",), _X86_V3),
    "baseline": ((), frozenset()),
}


class KernelUnavailable(RuntimeError):
    """The compiled kernel cannot be had here. The message says why, and what would help."""


_library: ctypes.CDLL | None = None
_failure: KernelUnavailable | None = None
_load_lock = threading.Lock()


def load() -> ctypes.CDLL:
    """The kernel library, compiled now if it never was. Thread-safe; later calls return the same object.

    Raises :class:`KernelUnavailable` when there is neither a usable library nor a working compiler, or when
    ``HF_PAGED_CPU_KERNEL=0`` turns the kernel off. A failure is remembered, not tried again in this process.
    """
    global _library, _failure
    with _load_lock:
        if _failure is not None:
            raise _failure
        if _library is None:
            try:
                _library = _find()
            except KernelUnavailable as error:
                _failure = error
                raise
        return _library


def _find() -> ctypes.CDLL:
    if os.environ.get("HF_PAGED_CPU_KERNEL") == "0":
        raise KernelUnavailable("The compiled CPU kernel is turned off (HF_PAGED_CPU_KERNEL=0).")
    shipped = _prebuilt()
    if shipped is not None and shipped.name != _prebuilt_name("baseline"):
        return _open(shipped)
    try:
        return _open(_cached_or_compiled())
    except KernelUnavailable as error:
        if shipped is None:
            raise
        logger.info("Using the shipped baseline CPU kernel, which is slow: %s", error)
        return _open(shipped)


def _open(path: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
        version = library.hf_paged_abi_version()
    except (OSError, AttributeError) as error:
        raise KernelUnavailable(
            f"The kernel library {path} cannot be loaded: {error}. If its folder forbids executables, set "
            "HF_PAGED_CACHE to another one."
        ) from error
    if version != ABI_VERSION:
        raise KernelUnavailable(f"The kernel library {path} has ABI version {version}; {ABI_VERSION} is needed.")
    return library


# ---- shipped libraries ------------------------------------------------------------------------------------------


def _prebuilt_name(variant: str) -> str:
    return f"paged_attention.abi{ABI_VERSION}.{variant}.so"


def _prebuilt() -> Path | None:
    """The best library beside this module whose instructions this CPU has, or None."""
    features = _cpu_features()
    for variant, (_, needed) in _VARIANTS.items():
        path = _HERE / _prebuilt_name(variant)
        if needed <= features and path.is_file():
            return path
    return None


def build_prebuilt(folder: Path, variants: Sequence[str] = tuple(_VARIANTS)) -> list[Path]:
    """Compiles libraries for a distributor to put next to this module into ``folder``; returns their paths.

    ``variants`` names instruction sets: ``x86-64-v4-bf16``, ``x86-64-v4``, ``x86-64-v3``, ``baseline`` (any CPU of the
    machine's architecture). Raises :class:`KernelUnavailable` when the compiler fails.
    """
    compiler = _compiler()
    built = []
    for variant in variants:
        flags, _ = _VARIANTS[variant]
        output = folder / _prebuilt_name(variant)
        error = _compile(compiler, (*_BASE_FLAGS, *flags, "-fopenmp"), output)
        if error is not None:
            raise KernelUnavailable(_compile_message(compiler, error))
        built.append(output)
    return built


# ---- the user's cache -------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Where compiled libraries are kept: ``kernels`` in ``$HF_PAGED_CACHE``, or in ``hf_paged`` in ``$XDG_CACHE_HOME``."""
    own = os.environ.get("HF_PAGED_CACHE")
    if own:
        return Path(own).expanduser() / "kernels"
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "hf_paged" / "kernels"


def _private_folder() -> Path:
    """Makes the cache folder, mode 0700, or refuses one that others can write to."""
    folder = cache_folder()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise KernelUnavailable(
            f"The folder {folder} for the compiled CPU kernel cannot be made ({error}); set HF_PAGED_CACHE to one that "
            "can."
        ) from error
    _refuse_unsafe(folder)
    return folder


def _refuse_unsafe(path: Path) -> None:
    """Raises unless only this user (or root) can have written ``path``: a planted library must never be loaded."""
    if not hasattr(os, "getuid"):
        return
    info = path.stat()
    if info.st_uid not in (os.getuid(), 0):
        raise KernelUnavailable(
            f"{path} belongs to another user (uid {info.st_uid}); libraries are not loaded from there. Remove it, or "
            "set HF_PAGED_CACHE to a folder of your own."
        )
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise KernelUnavailable(
            f"{path} can be written by other users (mode {stat.S_IMODE(info.st_mode):04o}); libraries are not loaded "
            f"from there. Run `chmod go-w {shlex.quote(str(path))}`, or set HF_PAGED_CACHE to a private folder."
        )


def _cached_or_compiled() -> Path:
    folder = _private_folder()
    compiler = _compiler()
    path = folder / f"paged_attention.abi{ABI_VERSION}.{_key(compiler)}.so"
    if not path.exists():
        with _locked(folder / (path.name + ".lock")):
            if not path.exists():  # nobody built it while this process waited
                _build_into(compiler, path)
    _refuse_unsafe(path)
    return path


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock; the system drops it when its holder dies, so a killed builder blocks nobody."""
    if fcntl is None:
        yield  # os.replace still keeps the result whole; at worst two processes compile
        return
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError:  # a file system without locks
            logger.debug("No lock on %s", path, exc_info=True)
        yield
    finally:
        os.close(descriptor)


def _build_into(compiler: tuple[str, ...], path: Path) -> None:
    """Compiles to a temporary file in the same folder and moves it to ``path`` in one step."""
    logger.info("Compiling the CPU kernel with %s (once; kept in %s)", compiler[0], path.parent)
    _remove_leftovers(path.parent)
    descriptor, name = tempfile.mkstemp(prefix=".building-", suffix=".so", dir=path.parent)
    os.close(descriptor)
    temporary = Path(name)
    try:
        error: str | None = None
        for optional in _OPTIONAL_FLAGS:
            error = _compile(compiler, (*_BASE_FLAGS, *optional), temporary)
            if error is None:
                break
        if error is not None:
            raise KernelUnavailable(_compile_message(compiler, error))
        temporary.chmod(0o700)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _remove_leftovers(folder: Path) -> None:
    """Deletes what builders that were killed left behind: temporary files older than any build can run."""
    for leftover in folder.glob(".building-*"):
        with contextlib.suppress(OSError):
            if leftover.stat().st_mtime < time.time() - 10 * _TIMEOUT:
                leftover.unlink()


# ---- the compiler -----------------------------------------------------------------------------------------------


def _compiler() -> tuple[str, ...]:
    """The command of the user's C++ compiler: ``$CXX`` (may hold arguments), or the first one on the PATH."""
    chosen = os.environ.get("CXX")
    if chosen:
        command = tuple(shlex.split(chosen))
        if command and shutil.which(command[0]):
            return command
        raise KernelUnavailable(f"CXX={chosen} is not an executable; unset it or name a C++ compiler.")
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return (name,)
    raise KernelUnavailable(
        "No C++ compiler was found (looked for $CXX, c++, g++ and clang++), so the CPU kernel cannot be compiled. "
        "Install one, for example `apt install g++`, `dnf install gcc-c++`, `conda install cxx-compiler` or "
        "`xcode-select --install`."
    )


def _run(command: Sequence[str], timeout: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=timeout,
        check=False,
    )


def _compile(compiler: Sequence[str], flags: Sequence[str], output: Path) -> str | None:
    """Runs the compiler; None when it worked, else what it said."""
    command = [*compiler, *flags, str(_SOURCES / _MAIN_SOURCE), "-o", str(output)]
    logger.debug("%s", shlex.join(command))
    try:
        result = _run(command, _TIMEOUT)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if result.returncode == 0:
        return None
    return result.stdout.strip() or f"exit status {result.returncode}, no output"


def _compile_message(compiler: Sequence[str], output: str) -> str:
    return (
        f"The CPU kernel could not be compiled with {shlex.join(compiler)}. Set CXX to a compiler that knows C++17 "
        f"(g++ 9, clang++ 10 or newer). Its output ends with:\n{output[-_ERROR_TAIL:]}"
    )


# ---- what the result depends on ---------------------------------------------------------------------------------


def _key(compiler: Sequence[str]) -> str:
    """Hash of sources, flags, compiler and CPU: another value, another library."""
    digest = hashlib.sha256()

    def add(text: bytes) -> None:
        digest.update(len(text).to_bytes(8, "little") + text)

    for source in sorted(_SOURCES.iterdir()):
        if source.suffix in {".cpp", ".h"}:
            add(source.name.encode())
            add(source.read_bytes())
    add(repr((_BASE_FLAGS, _OPTIONAL_FLAGS, ABI_VERSION, sys.platform, platform.machine())).encode())
    try:
        version = _run([*compiler, "--version"], 60.0).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelUnavailable(_compile_message(compiler, str(error))) from error
    add(shlex.join(compiler).encode())
    add(version.encode())
    add(" ".join(sorted(_cpu_features())).encode())
    add(_cpu_model().encode())
    return digest.hexdigest()[:20]


@functools.cache
def _cpu_info() -> str:
    """The first processor's entry of /proc/cpuinfo, or ''."""
    try:
        return Path("/proc/cpuinfo").read_text(errors="replace").split("\n\n", 1)[0]
    except OSError:
        return ""


def _cpu_field(*names: str) -> str:
    for line in _cpu_info().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in names:
            return value.strip()
    return ""


def _cpu_features() -> frozenset[str]:
    return frozenset(_cpu_field("flags", "Features").split())


def _cpu_model() -> str:
    # -march=native follows the model: a home folder shared by two machines must hold two libraries.
    return _cpu_field("model name", "CPU part") or platform.processor()
