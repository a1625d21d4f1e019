"""How the compiled CPU kernel is found, built and kept. A tiny source stands in for the kernel, so builds are quick."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hf_paged.kernels import build
from hf_paged.kernels.build import KernelUnavailable

GXX = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")

pytestmark = [
    pytest.mark.skipif(GXX is None, reason="no C++ compiler"),
    pytest.mark.skipif(not hasattr(os, "getuid"), reason="POSIX only"),
]

SOURCE = """
extern "C" __attribute__((visibility("default"))) int hf_paged_abi_version() {{ return {version}; }}
"""


class Sandbox:
    """A source folder, a cache folder and a compiler that notes every compilation."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.cache = root / "cache" / "kernels"
        self.shipped = root / "package"
        self.sources = root / "csrc"
        self.log = root / "compilations"
        for folder in (self.shipped, self.sources):
            folder.mkdir()
        self.source(build.ABI_VERSION)
        self.compiler = self.script("compiler", f'exec {GXX} "$@"')

    def source(self, version: int) -> None:
        (self.sources / "paged_attention.cpp").write_text(SOURCE.format(version=version))

    def script(self, name: str, action: str) -> Path:
        path = self.root / name
        path.write_text(f'#!/bin/sh\ncase "$*" in *--version) ;; *) echo "$@" >> {self.log};; esac\n{action}\n')
        path.chmod(0o755)
        return path

    def compilations(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0

    def libraries(self) -> list[Path]:
        return sorted(self.cache.glob("*.so"))

    def process(self, compiler: Path) -> subprocess.Popen[str]:
        """Another process that loads the kernel with this sandbox's folders."""
        code = (
            "import pathlib\n"
            "from hf_paged.kernels import build\n"
            f"build._SOURCES = pathlib.Path({str(self.sources)!r})\n"
            f"build._HERE = pathlib.Path({str(self.shipped)!r})\n"
            "print(build.load().hf_paged_abi_version())\n"
        )
        environment = {
            **os.environ,
            "CXX": str(compiler),
            "HF_PAGED_CACHE": str(self.cache.parent),
            "PYTHONPATH": str(Path(build.__file__).resolve().parents[2]),
        }
        return subprocess.Popen(
            [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )


@pytest.fixture
def sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    box = Sandbox(tmp_path)
    monkeypatch.setattr(build, "_SOURCES", box.sources)
    monkeypatch.setattr(build, "_HERE", box.shipped)
    monkeypatch.setenv("HF_PAGED_CACHE", str(box.cache.parent))
    monkeypatch.setenv("CXX", str(box.compiler))
    monkeypatch.delenv("HF_PAGED_CPU_KERNEL", raising=False)
    forget(monkeypatch)
    return box


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process; undone after the test."""
    monkeypatch.setattr(build, "_library", None)
    monkeypatch.setattr(build, "_failure", None)


def test_compiles_once_and_then_finds_it(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    library = build.load()
    assert library.hf_paged_abi_version() == build.ABI_VERSION
    assert build.load() is library
    assert sandbox.compilations() == 1
    assert sandbox.cache.stat().st_mode & 0o777 == 0o700
    assert sandbox.libraries()[0].stat().st_mode & 0o077 == 0
    assert not list(sandbox.cache.glob(".building-*"))
    forget(monkeypatch)
    build.load()
    assert sandbox.compilations() == 1


def test_a_change_of_source_compiler_or_cpu_compiles_again(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    def again() -> int:
        forget(monkeypatch)
        build.load()
        return sandbox.compilations()

    assert again() == 1
    (sandbox.sources / "more.h").write_text("// a header\n")
    assert again() == 2
    monkeypatch.setenv("CXX", f"{sandbox.compiler} -g")
    assert again() == 3
    monkeypatch.setattr(build, "_cpu_features", lambda: frozenset({"another"}))
    assert again() == 4
    assert len(sandbox.libraries()) == 4


def test_two_processes_compile_once(sandbox: Sandbox) -> None:
    slow = sandbox.script("slow", f'[ "$1" = --version ] || sleep 1\nexec {GXX} "$@"')
    processes = [sandbox.process(slow) for _ in range(3)]
    for process in processes:
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0 and output.strip() == str(build.ABI_VERSION), output
    assert sandbox.compilations() == 1


def test_a_killed_builder_blocks_nobody(sandbox: Sandbox) -> None:
    stuck = sandbox.script("stuck", f'[ "$1" = --version ] && exec {GXX} "$@"\nexec sleep 20')
    victim = sandbox.process(stuck)
    deadline = time.monotonic() + 30
    while sandbox.compilations() == 0 and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(victim.pid, signal.SIGKILL)
    victim.wait()
    assert sandbox.compilations() == 1 and not [p for p in sandbox.libraries() if not p.name.startswith(".building")]
    # The same compiler path, so the same key and the same lock; it works now.
    sandbox.script("stuck", f'exec {GXX} "$@"')
    output, _ = sandbox.process(stuck).communicate(timeout=15)
    assert output.strip() == str(build.ABI_VERSION), output


def test_no_compiler(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(sandbox.root / "nothing"))
    with pytest.raises(KernelUnavailable, match=r"No C\+\+ compiler .*`apt install g\+\+`"):
        build.load()


def test_cxx_that_does_not_exist(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/no/such/compiler -O1")
    with pytest.raises(KernelUnavailable, match="CXX=/no/such/compiler"):
        build.load()


def test_broken_compiler_is_quoted_and_not_tried_again(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = sandbox.script("broken", 'echo "fatal: out of cheese"\nexit 1')
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(KernelUnavailable, match=r"(?s)could not be compiled with .*broken.*out of cheese") as first:
        build.load()
    tried = sandbox.compilations()
    assert tried == len(build._OPTIONAL_FLAGS)
    with pytest.raises(KernelUnavailable) as second:
        build.load()
    assert second.value is first.value and sandbox.compilations() == tried
    assert not list(sandbox.cache.glob("*.so")) and not list(sandbox.cache.glob(".building-*"))


@pytest.mark.parametrize("refused", ["-march=native", "-fopenmp"])
def test_flags_that_the_compiler_refuses_are_left_out(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    picky = sandbox.script(
        "picky", f'case "$*" in *{refused}*) echo "unknown {refused}"; exit 1;; esac\nexec {GXX} "$@"'
    )
    monkeypatch.setenv("CXX", str(picky))
    build.load()
    last = sandbox.log.read_text().splitlines()[-1]
    others = {"-march=native", "-fopenmp"} - {refused}
    assert refused not in last and all(flag in last for flag in others)


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_refuses_a_folder_that_others_can_write(sandbox: Sandbox, mode: int) -> None:
    sandbox.cache.mkdir(parents=True)
    sandbox.cache.chmod(mode)
    with pytest.raises(KernelUnavailable, match=r"can be written by other users.*chmod go-w"):
        build.load()
    assert sandbox.compilations() == 0


def test_refuses_a_library_that_others_can_write(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    build.load()
    sandbox.libraries()[0].chmod(0o722)
    forget(monkeypatch)
    with pytest.raises(KernelUnavailable, match=r"paged_attention.*can be written by other users"):
        build.load()


@pytest.mark.parametrize("what", ["folder", "library"])
def test_refuses_what_belongs_to_somebody_else(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    build.load()
    forget(monkeypatch)
    path = sandbox.cache if what == "folder" else sandbox.libraries()[0]
    if os.getuid() == 0:
        os.chown(path, 12345, -1)
    else:
        monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(KernelUnavailable, match="belongs to another user"):
        build.load()


def test_a_folder_that_cannot_be_made(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    (sandbox.root / "file").write_text("")
    monkeypatch.setenv("HF_PAGED_CACHE", str(sandbox.root / "file"))
    with pytest.raises(KernelUnavailable, match=r"cannot be made.*HF_PAGED_CACHE"):
        build.load()


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_PAGED_CACHE", "/a/b")
    assert build.cache_folder() == Path("/a/b/kernels")
    monkeypatch.delenv("HF_PAGED_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert build.cache_folder() == Path("/x/hf_paged/kernels")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert build.cache_folder() == Path.home() / ".cache" / "hf_paged" / "kernels"


def test_turned_off(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_PAGED_CPU_KERNEL", "0")
    with pytest.raises(KernelUnavailable, match="HF_PAGED_CPU_KERNEL=0"):
        build.load()
    assert sandbox.compilations() == 0


def test_another_abi_version_is_refused(sandbox: Sandbox) -> None:
    sandbox.source(build.ABI_VERSION + 1)
    with pytest.raises(KernelUnavailable, match=f"ABI version {build.ABI_VERSION + 1}; {build.ABI_VERSION} is needed"):
        build.load()


def test_shipped_library_comes_first(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    (shipped,) = build.build_prebuilt(sandbox.shipped, ["baseline"])
    best = shipped.rename(sandbox.shipped / build._prebuilt_name("x86-64-v3"))
    before = sandbox.compilations()
    monkeypatch.setattr(build, "_cpu_features", lambda: build._X86_V3)
    monkeypatch.setattr(build, "_compiler", lambda: pytest.fail("no compiler is needed"))
    library = build.load()
    assert isinstance(library, ctypes.CDLL) and library._name == str(best)
    assert sandbox.compilations() == before


def test_shipped_library_for_another_cpu_is_left_alone(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    (sandbox.shipped / build._prebuilt_name("x86-64-v4")).write_bytes(b"would crash")
    monkeypatch.setattr(build, "_cpu_features", lambda: build._X86_V3)
    assert Path(build.load()._name).parent == sandbox.cache


def test_shipped_baseline_serves_only_without_a_compiler(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    (baseline,) = build.build_prebuilt(sandbox.shipped, ["baseline"])
    assert Path(build.load()._name).parent == sandbox.cache
    forget(monkeypatch)
    monkeypatch.setenv("CXX", "/no/such/compiler")
    assert build.load()._name == str(baseline)


@pytest.mark.slow
def test_the_real_sources_compile_for_every_shipped_variant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    for path in build.build_prebuilt(tmp_path):
        assert path.stat().st_size > 10_000
