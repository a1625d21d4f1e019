"""What a backend does wrong when it is tried, and that another one is taken then. The GPU is the CPU, with doubles."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from flash_doubles import DOUBLES, FlashAttn2, FlashAttn3, FlashAttn4, Missing
from torch import Tensor

from hf_paged import LayerGeometry, PagePool, doctor
from hf_paged.kernels import BACKENDS, choose, flash_find, trial
from hf_paged.kernels.backend import FEATURES, Backend
from hf_paged.kernels.flash import Flash2, Flash3, Flash4

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Short rows, as the doubles are slow, and no verdict of another test."""
    monkeypatch.setattr(trial, "LENGTHS", (300, 20))
    trial.failure_of.cache_clear()
    yield
    trial.failure_of.cache_clear()


@pytest.mark.parametrize("dims", [(64, 64), (20, 12)])
@pytest.mark.parametrize("kernel", ["double2", "double3", "double4", "cpu"])
def test_what_is_right_passes(kernel: str, dims: tuple[int, int]) -> None:
    backend = BACKENDS[kernel]
    dtype = torch.bfloat16 if kernel != "cpu" else torch.float32
    dims = (64, 64) if kernel == "cpu" else dims
    for features in (frozenset[str](), backend.features & FEATURES):
        assert trial.failure_of(kernel, CPU, dtype, *dims, backend.block_size, features) is None


MISTAKES: dict[str, dict[str, Any]] = {
    "the last key is not seen": dict(seq_lens=lambda x: x - 1),
    "a row reads the frames of another": dict(block_table=lambda x: x.flip(0)),
    "the window is not heeded": dict(window=lambda x: 0),
    "the soft cap is not heeded": dict(softcap=lambda x: 0.0),
    "heads are mixed up": dict(q=lambda x: x.flip(1)),
}
NAMES = list(inspect.signature(Backend.attention).parameters)[1:]


@pytest.mark.parametrize("mistake", [*MISTAKES, "nothing is written", "not a number"])
def test_what_is_wrong_is_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = BACKENDS["reference"].attention

    def attention(*args: Any) -> Tensor:
        changed = {name: change(args[NAMES.index(name)]) for name, change in MISTAKES.get(mistake, {}).items()}
        out = right(*(changed.get(name, value) for name, value in zip(NAMES, args)))
        return out.fill_(float("nan")) if mistake == "not a number" else out

    write = BACKENDS["reference"].write if mistake != "nothing is written" else lambda *args: None
    parts = dict(attention=attention, write=write, features=FEATURES, needs_zeroed_frames=True)
    wrong = types.SimpleNamespace(**parts, storage_dims=lambda *dims: dims)
    monkeypatch.setitem(BACKENDS, "wrong", wrong)  # type: ignore[arg-type]
    failure = trial.failure_of("wrong", CPU, torch.bfloat16, 64, 64, 16, frozenset({"window", "softcap"}))
    assert failure is not None and failure.startswith("wrong was wrong by ")


def test_the_next_best_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Version 3 gives wrong numbers, version 2 does not run, version 4 works."""
    three, two, four = FlashAttn3(), FlashAttn2(), FlashAttn4()
    for double, adapter in ((three, Flash3), (two, Flash2), (four, Flash4)):
        find = lambda double=double: flash_find.functions_of(double, type(double).__name__)  # noqa: E731
        monkeypatch.setitem(BACKENDS, f"flash{adapter.version}", adapter(find, lambda device: (9, 0)))
    monkeypatch.setattr(three, "_run", lambda *args, _run=three._run, **kwargs: 1.5 * _run(*args, **kwargs))

    def no_image(*args: Any, **kwargs: Any) -> Tensor:
        raise RuntimeError("no kernel image is available for execution on the device\nCompile with ...")

    monkeypatch.setattr(two, "_check", no_image)
    monkeypatch.setitem(BACKENDS, "triton", Missing("no triton here"))
    tried: list[str] = []
    asked: list[frozenset[str]] = []

    def on_cpu(name: str, device: torch.device, *rest: Any) -> str | None:
        assert device == CUDA
        tried.append(name)
        asked.append(rest[-1])
        return trial.failure_of(name, CPU, *rest)

    monkeypatch.setattr(choose, "failure_of", on_cpu)
    monkeypatch.setattr(choose, "cuda_capability", lambda device: (9, 0))
    options: dict[str, Any] = dict(num_blocks=4, dtype=torch.float16, device="cuda")
    layers = [LayerGeometry(2, 16, 16)]
    pool = PagePool(layers, **options)
    assert pool.kernel == "flash4" and tried == ["flash3", "flash2", "flash4"]
    assert "flash3 was wrong by " in pool.kernel_reason
    assert "flash2 failed when it was tried on cpu: RuntimeError: no kernel image is available" in pool.kernel_reason
    assert "Compile with" not in pool.kernel_reason
    with pytest.raises(ValueError, match="kernel='flash3' cannot serve this pool: flash3 was wrong by"):
        PagePool(layers, kernel="flash3", **options)
    PagePool(layers, kernel="flash4", needs={"softcap", "sinks"}, **options)
    assert asked[-1] == {"softcap", "sinks"}
    calls = len(four.calls)
    assert PagePool(layers, **options).kernel == "flash4" and len(four.calls) == calls  # it was tried before
    lines = doctor.kernel_lines(CUDA, doctor.Subject(list(layers), set(), torch.float16))
    assert any("flash3     no: flash3 was wrong by" in line for line in lines)


def test_no_memory_says_nothing_about_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as context:
        context.setattr(BACKENDS["double2"], "attention", full)
        with pytest.raises(torch.OutOfMemoryError):
            trial.failure_of("double2", CPU, torch.float16, 16, 16, 256, frozenset())
    assert trial.failure_of("double2", CPU, torch.float16, 16, 16, 256, frozenset()) is None


def test_every_call_is_tried() -> None:
    """Long rows with one query each, which are split, rows with more, and both again with the features of the model."""
    for features, functions in (
        (frozenset[str](), ["varlen"] * 2),
        (frozenset({"window"}), ["with_kvcache", "varlen"]),
    ):
        DOUBLES["double2"].calls.clear()
        trial.failure_of("double2", CPU, torch.float16, 16, 16, 256, features)
        calls = [function for function, _ in DOUBLES["double2"].calls]
        assert sorted(calls) == sorted(functions + (["varlen"] * 2 if features else []))
