"""The benchmark command runs every task on a small model and reports what it saw. No number is judged."""

from __future__ import annotations

import json
import types
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
    cpu = torch.device("cpu")
    shape = backends.shape_on(cpu)
    layers = [torch.randn(shape.numbers, generator=generator) for _ in range(2)]
    for name in ("reference", "cpu"):
        outs[name] = []
        backends._attention(name, layers, cpu, shape)()
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
    assert row.notes["static"] > 0 and used.count("static") == 4 and used.count(None) == 4
    other = tasks.run_generate("ragged", model, options, 1, iter, with_static=True)
    assert "static" not in other.notes
    lines = [*cli.header({}, True).splitlines(), cli.line(row, True), cli.line(other, True)]
    assert "| static, compiled |" in lines[2] and len({line.count("|") for line in lines[2:]}) == 1


@pytest.mark.parametrize("succeeds", [0, 3])
def test_a_static_cache_that_fails(succeeds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, or while it is measured. It is not tried again."""
    model, calls = tiny.build("llama", "sdpa"), []
    generate = type(model).generate

    def refuse(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("cache_implementation") == "static":
            calls.append("static")
            if len(calls) > succeeds:
                raise ValueError("no static cache\nat all")
        return generate(*args, **kwargs)

    monkeypatch.setattr(type(model), "generate", refuse)
    row = tasks.run_generate("batch", model, dict(block_size=4, kernel=None), 1, iter, with_static=True)
    assert row.notes["static_cache_failed"] == "ValueError: no static cache" and "static" not in row.notes
    assert row.default > 0 and row.paged > 0 and len(calls) == succeeds + 1


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


def test_a_difference_below_the_noise_has_no_ratio(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ops, "run_reorder", lambda *args: measure.Row("reorder", 0.5, -0.25))
    files = tmp_path / "out.json", tmp_path / "out.png"
    assert main(["bench", "--task", "reorder", "--json", str(files[0]), "--plot", str(files[1])]) == 0
    assert "| reorder | 0.500 s | -0.250 s | below noise |" in capsys.readouterr().out
    assert json.loads(files[0].read_text(), parse_constant=pytest.fail)["results"][0]["ratio"] is None
    assert files[1].exists()


def test_long_and_short_steps_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a machine that slows down meanwhile slows both of a difference."""
    order: list[int] = []
    make = tasks._steps

    def steps(model: Any, rows: int, context: int, *args: Any) -> Any:
        return {
            side: lambda step=step: order.append(context) or step()
            for side, step in make(model, rows, context, *args).items()
        }

    monkeypatch.setattr(tasks, "_steps", steps)
    tasks.run_step("step-8x1024", tiny.build("llama", "sdpa"), dict(block_size=4, kernel=None), 1, iter)
    assert order == [tasks.STEP_FLOOR, tasks.STEP_FLOOR, 40, 40] * 5


def test_the_gpu_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(measure, "on_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("wait"))
    interleave(dict(a=lambda: calls.append("a")), 2)
    assert calls == ["a"] + ["wait", "a", "wait"] * 2


def test_grpo_waits_for_the_gpu_around_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    """And counts what was measured only, however often it was warmed up."""
    model, calls = tiny.build("llama", "sdpa"), []
    generate = type(model).generate
    monkeypatch.setattr(type(model), "generate", lambda *a, **k: calls.append("generate") or generate(*a, **k))
    monkeypatch.setattr(pipelines, "finish", lambda: calls.append("wait"))
    clock = types.SimpleNamespace(perf_counter=lambda: calls.append("clock") or float(len(calls)))
    monkeypatch.setattr(pipelines, "time", clock)
    row = pipelines.run_grpo(model, dict(block_size=4, kernel=None), 2, iter)
    assert calls == ["wait", "clock", "generate", "wait", "clock"] * 2 * 2 * 3  # steps, sides, runs
    assert row.default_runs == row.paged_runs == [6.0, 6.0]  # from clock to clock: 3 calls, in each of two steps


def test_decode_leaves_the_block_size_to_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    pool = ops.PagePool
    monkeypatch.setattr(ops, "PagePool", lambda *a, **k: made.append((k["kernel"], k["block_size"])) or pool(*a, **k))
    monkeypatch.setattr(backends.BACKENDS["cpu"], "block_size", 32)
    for asked in (None, 8):
        options: dict[str, Any] = dict(block_size=asked, kernel=None)
        ops.run_decode(torch.float32, options, 1, iter)
    assert made == [(None, 32), (None, 8)]


def test_a_gpu_has_fewer_repeats_and_larger_kernels(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert backends.shape_on(torch.device("cuda")) == (4 * ops.ROWS, 4 * ops.CONTEXT, 2)
    repeats: list[int] = []
    monkeypatch.setattr(
        ops, "run_reorder", lambda repeat, *args: repeats.append(repeat) or measure.Row("reorder", 1, 1)
    )
    monkeypatch.setattr(cli, "describe", lambda options: {})
    for device in ("cuda", "cpu"):
        monkeypatch.setattr(cli, "device_of", lambda name: torch.device(name))
        assert main(["bench", "--task", "reorder", "--device", device]) == 0
    assert repeats == [cli.GPU_REPEATS, cli.REPEATS]


def test_every_task_is_described() -> None:
    assert list(cli.ABOUT) == [*cli.TASKS, "kernels"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--repeats", "0"], "argument --repeats: 0 must be a whole number of at least 1"),
        (["--repeats", "2.5"], "argument --repeats: 2.5 must be"),
        (["--threads", "-1"], "argument --threads: -1 must be"),
        (["--kernel", "warp"], "argument --kernel: invalid choice: 'warp'"),
        (["--task", "warp"], "argument --task: invalid choice: 'warp'"),
        (
            ["--json", "/nowhere/out.json"],
            "argument --json: /nowhere/out.json cannot be written: name a file in a folder",
        ),
        (["--plot", "."], "argument --plot: . cannot be written"),
    ],
)
def test_what_is_wrong_is_said_first(flags: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["bench", "--task", "reorder", *flags])
    assert exit.value.code == 2 and says in capsys.readouterr().err


def test_a_model_that_cannot_be_paged_so(folder: str) -> None:
    with pytest.raises(SystemExit, match="kernel='flash4' cannot serve this pool"):
        main(["bench", "--task", "batch", "--model", folder, "--kernel", "flash4"])


def test_a_task_that_fails_or_is_too_long(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a line of its own; what was done before is saved by then, and the others go on."""
    file = tmp_path / "out.json"
    saved: list[Any] = []

    def fail(*args: Any) -> Any:
        saved.append(json.loads(file.read_text()))
        raise MemoryError("no | room\nat all")

    monkeypatch.setattr(ops, "run_decode", fail)
    monkeypatch.setitem(tasks.GENERATE, "long", tasks.Task([10**6], {}))
    chosen = [flag for name in ("reorder", "decode", "long", "batch") for flag in ("--task", name)]
    assert main(["bench", "--model", folder, *chosen, "--dtype", "float32", "--repeats", "1", "--json", str(file)]) == 1
    printed, results = capsys.readouterr(), json.loads(file.read_text())
    assert [row["task"] for row in saved[0]["results"]] == ["reorder"] and saved[0]["problems"] == {}
    assert [row["task"] for row in results["results"]] == ["reorder", "batch"]
    too_long = f"skipped: needs {10**6 + 64} positions, the model has 2048"
    assert results["problems"] == {"decode": "failed: MemoryError: no / room", "long": too_long}
    begins = [line.split(" | ")[0] for line in printed.out.splitlines()[-4:]]
    assert begins == ["| reorder", "| decode", "| long", "| batch"]
    assert f"| long | {too_long} |" in printed.out and "Traceback" in printed.err


@pytest.mark.parametrize("name", [*tasks.GENERATE, *tasks.STEPS, *pipelines.PIPELINES])
def test_the_positions_of_a_task(name: str, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No row is ever longer, and one token more would not be covered."""
    model = tiny.build("llama", "sdpa")
    longest = [0]
    forward = type(model).forward
    length_of = lambda cache: cache.get_seq_length() if cache is not None else 0  # noqa: E731

    def spy(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = forward(self, *args, **kwargs)
        longest[0] = max(longest[0], length_of(getattr(out, tiny.CACHE, None)))
        return out

    monkeypatch.setattr(type(model), "forward", spy)
    options: dict[str, Any] = dict(block_size=4, kernel=None)
    if name in tasks.GENERATE:
        tasks.run_generate(name, model, options, 1, iter)
    elif name in tasks.STEPS:
        tasks.run_step(name, model, options, 1, iter)
    else:
        pipelines.PIPELINES[name](model, options, 1, iter)
    needed = pipelines.positions_of(name) if name in pipelines.PIPELINES else tasks.positions_of(name, 1)
    assert needed - 1 <= longest[0] <= needed  # the last token is not always fed
