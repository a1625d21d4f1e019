"""The benchmark command runs every task on a small model and reports what it saw. No number is judged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from hf_paged.__main__ import main
from hf_paged.bench import backends, cli, measure, ops, pipelines, tasks
from hf_paged.bench.measure import interleave


@pytest.fixture
def folder(tmp_path: Path) -> str:
    tiny.build("llama", "sdpa").save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tasks, a hundred times smaller."""
    for name, task in tasks.GENERATE.items():
        lengths = [max(2, length // 40) for length in task.lengths]
        monkeypatch.setitem(tasks.GENERATE, name, task._replace(lengths=lengths, new=6))
    for name in tasks.STEPS:
        monkeypatch.setitem(tasks.STEPS, name, tasks.StepTask(2, 40))
    for name, value in dict(ROWS=2, CONTEXT=40, LAYERS=2).items():
        monkeypatch.setattr(ops, name, value)
    for name, value in dict(TURN_TOKENS=20, ANSWER_TOKENS=4, GRPO_ROWS=3, GRPO_PROMPT=20, GRPO_NEW=4).items():
        monkeypatch.setattr(pipelines, name, value)


def test_all_tasks(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = tmp_path / "out.json", tmp_path / "out.png"
    flags = ["--dtype", "float32", "--repeats", "1", "--json", str(files[0]), "--plot", str(files[1])]
    assert main(["bench", "--model", folder, *flags]) == 0
    printed, results = capsys.readouterr().out, json.loads(files[0].read_text())
    names = [row["task"] for row in results["results"]]
    assert names == [
        *tasks.GENERATE,
        *pipelines.PIPELINES,
        *tasks.STEPS,
        *(f"decode vs {x}" for x in ("cat + sdpa", "sdpa", "read")),
        "reorder",
    ]
    for row in results["results"]:
        assert f"| {row['task']} |" in printed
        if row["task"] not in tasks.STEPS:  # a difference of two times, which may be anything at this size
            assert row["default"] > 0 and row["paged"] > 0
        if row["task"] in tasks.GENERATE:
            assert row["notes"]["tokens"] == "identical" and row["notes"]["kernel"] == "cpu"
            assert len(row["default_runs"]) == len(row["paged_runs"]) == 1
            assert row["notes"]["kv_bytes"]["paged"] > 0
    assert results["settings"]["dtype"] == "float32"
    assert files[1].read_bytes().startswith(b"\x89PNG")


def test_one_task_with_random_weights_and_another_kernel(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--random-weights", "--kernel", "reference", "--block-size", "4", "--repeats", "1"]
    assert main(["bench", "--model", folder, "--task", "batch", *flags]) == 0
    printed = capsys.readouterr().out
    assert "kernel reference" in printed and "| batch |" in printed and "| long |" not in printed


def test_a_model_is_asked_for() -> None:
    with pytest.raises(SystemExit, match="--model is needed for batch"):
        main(["bench", "--task", "batch"])


def test_a_gpu_that_is_not_there(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SystemExit, match=r"--device cuda: torch .* sees 0 CUDA devices here"):
        main(["bench", "--device", "cuda", "--model", folder])
    with pytest.raises(SystemExit, match="--device gpu is not known"):
        main(["bench", "--device", "gpu", "--model", folder])


def test_every_backend_against_a_copy(capsys: pytest.CaptureFixture[str]) -> None:
    """What a GPU gets beside the other tasks."""
    assert main(["bench", "--task", "kernels", "--dtype", "float32", "--repeats", "1"]) == 0
    printed = capsys.readouterr().out
    for name in ("reference", "cpu"):
        assert f"| kernel {name} vs copy |" in printed
    assert "static" not in printed


def test_the_backends_compute_what_they_should(monkeypatch: pytest.MonkeyPatch) -> None:
    outs: dict[str, list[Any]] = {}
    for name, kernel in list(backends.KERNELS.items()):
        monkeypatch.setitem(backends.KERNELS, name, lambda *a, name=name, kernel=kernel: outs[name].append(kernel(*a)))
    generator = torch.Generator().manual_seed(0)
    layers = [torch.randn(backends._numbers(), generator=generator) for _ in range(2)]
    for name in ("reference", "cpu"):
        outs[name] = []
        backends._attention(name, layers, torch.device("cpu"))()
    for want, got in zip(outs["reference"], outs["cpu"]):
        assert torch.allclose(want, got, atol=1e-5) and want.shape == (2, ops.HEADS, ops.HEAD_DIM)


def test_the_static_cache_is_a_third_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where transformers compiles it."""
    model = tiny.build("llama", "sdpa")
    used: list[Any] = []
    generate = type(model).generate
    monkeypatch.setattr(
        type(model), "generate", lambda *a, **k: used.append(k.get("cache_implementation")) or generate(*a, **k)
    )
    options: dict[str, Any] = dict(block_size=4, kernel=None)
    row = tasks.run_generate("batch", model, options, 1, iter, with_static=True)
    assert row.notes["static"] > 0 and used.count("static") == 3 and used.count(None) == 4
    other = tasks.run_generate("ragged", model, options, 1, iter, with_static=True)
    assert "static" not in other.notes
    lines = cli.table([row, other], {}).splitlines()
    assert "| static, compiled |" in lines[2] and len({line.count("|") for line in lines[2:]}) == 1

    def refuse(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("cache_implementation") == "static":
            raise ValueError("no static cache")
        return generate(*args, **kwargs)

    monkeypatch.setattr(type(model), "generate", refuse)
    row = tasks.run_generate("batch", model, options, 1, iter, with_static=True)
    assert row.notes["static_cache_failed"] == "ValueError: no static cache" and "static" not in row.notes


def test_agreement() -> None:
    want = torch.tensor([[9, 9, 1, 2, 3], [9, 9, 4, 5, 6]])
    got = torch.tensor([[9, 9, 1, 7, 3], [9, 9, 4, 5, 6]])
    assert tasks.agreement(want, want, 2) == "identical"
    assert tasks.agreement(want, got, 2) == "4 of 6 up to the first difference"


def test_ways_take_turns() -> None:
    calls: list[str] = []
    ways: dict[str, Any] = {name: lambda name=name: calls.append(name) for name in "ab"}
    seconds = interleave(ways, 3, collect=True)
    assert calls == list("ab" + "ab" * 3) and [len(values) for values in seconds.values()] == [3, 3]


def test_the_gpu_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(measure, "on_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("wait"))
    interleave(dict(a=lambda: calls.append("a")), 2)
    assert calls == ["a"] * measure.GPU_WARM_UPS + ["wait", "a", "wait"] * 2
