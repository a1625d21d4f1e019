"""Command line of the benchmarks: runs tasks, prints a table, writes JSON and a picture."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import traceback
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm.auto import tqdm

from .. import PagePool
from ..doctor import not_a_model
from ..kernels import BACKENDS
from . import backends, ops, pipelines, tasks
from .measure import Row, on_gpu

TASKS = [*tasks.GENERATE, *pipelines.PIPELINES, *tasks.STEPS, "decode", "reorder"]
WITHOUT_MODEL = ("decode", "reorder", "kernels")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
REPEATS, GPU_REPEATS = 5, 3

DESCRIPTION = """\
Measure the default cache against hf_paged: each task runs on both in turn in one process, once to warm up and then
--repeats times, and its row holds the medians. On a GPU, some tasks also run with transformers' static cache, whose
compiled code is warmed up three times. Rows are printed, and --json is saved, as soon as they are known. A task that needs
more positions than the model has is skipped; one that fails is named in the table, the others go on, and the exit status
is 1.
"""
ABOUT = {
    "samples": "generate: 1 prompt of 1024 tokens, 8 samples, 64 new tokens",
    "beams": "generate: 1 prompt of 2048 tokens, 8 beams, 64 new tokens",
    "beams-small": "generate: 1 prompt of 512 tokens, 4 beams, 64 new tokens",
    "batch": "generate: 8 prompts of 1024 tokens, greedy, 64 new tokens",
    "ragged": "generate: 16 prompts of 64 to 964 tokens in one batch, greedy, 64 new tokens",
    "long": "generate: 1 prompt of 4000 tokens, greedy, 64 new tokens",
    "chat": "four turns of 200 tokens in and 64 out, all ids so far passed each time",
    "grpo": "8 equal rows of 512 tokens sampled in training, 64 new tokens; the time of generate alone",
    "step-8x1024": "what cache and attention add to a decode step of 8 rows x 1024 tokens",
    "step-16x2048": "the same with 16 rows x 2048 tokens",
    "decode": "the attention of one layer in a decode step of 16 rows x 2048 tokens; needs no model",
    "reorder": "the bookkeeping of a step of 8 x 8 beams with 512 blocks each; needs no model",
    "kernels": "every backend that serves on the device against a copy of the same bytes there; needs no model",
}


def at_least_one(text: str) -> int:
    """A number for an option. Raises `argparse.ArgumentTypeError` below 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be a whole number of at least 1")
    return int(text)


def new_file(text: str) -> Path:
    """A file that can be written. Raises `argparse.ArgumentTypeError` where its folder does not allow that."""
    file = Path(text)
    if file.is_dir() or not os.access(file.parent, os.W_OK) or (file.exists() and not os.access(file, os.W_OK)):
        raise argparse.ArgumentTypeError(f"{text} cannot be written: name a file in a folder that exists and is yours")
    return file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = DESCRIPTION
    parser.epilog = "tasks:\n" + "\n".join(f"  {name:<14}{what}" for name, what in ABOUT.items())
    parser.add_argument("--model", help="a local folder or a Hub id; not needed for decode, reorder and kernels")
    parser.add_argument("--random-weights", action="store_true", help="build the model from its config alone")
    parser.add_argument(
        "--task", action="append", choices=ABOUT, metavar="TASK", help="see below; may be repeated; default: all"
    )
    parser.add_argument("--device", default="cpu", help="cpu (default), cuda or cuda:N; on a GPU also the task kernels")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument(
        "--repeats",
        type=at_least_one,
        help=f"measured runs of each side (default {REPEATS}, on a GPU {GPU_REPEATS}, where all tasks then take minutes)",
    )
    parser.add_argument("--threads", type=at_least_one, help="torch threads (default: torch's own choice)")
    parser.add_argument("--block-size", type=at_least_one, help="tokens per block (default: the pool's choice)")
    parser.add_argument("--kernel", choices=["auto", *BACKENDS], help="backend (default: the pool's choice)")
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write all runs and settings there")
    parser.add_argument("--plot", type=new_file, metavar="FILE", help="draw the ratios there (needs hf_paged[viz])")


def run(options: argparse.Namespace) -> int:
    """Run the chosen tasks. Returns the exit status: 1 where one failed."""
    device = device_of(options.device)
    chosen = options.task or (TASKS if device.type == "cpu" else [*TASKS, "kernels"])
    options.repeats = options.repeats or (REPEATS if device.type == "cpu" else GPU_REPEATS)
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        raise SystemExit("--plot needs matplotlib: pip install 'hf_paged[viz]'")
    if options.threads:
        torch.set_num_threads(options.threads)
    needs_model = [name for name in chosen if name not in WITHOUT_MODEL]
    if needs_model and not options.model:
        raise SystemExit(f"--model is needed for {', '.join(needs_model)}: give a folder or a Hub id")
    bench = Bench(options, device, bool(needs_model))
    settings, with_static = describe(options), device.type != "cpu" and any(name in tasks.STATIC for name in chosen)
    print(header(settings, with_static), flush=True)
    rows: list[Row] = []
    problems: dict[str, str] = {}  # by task: why it has no rows
    failed = 0
    for name in chosen:
        new: list[Row] = []
        try:
            lacking = bench.lacking(name)
            if lacking:
                problems[name] = f"skipped: {lacking}"
            else:
                new = bench.run(name)
        except Exception as error:
            traceback.print_exc()
            problems[name] = f"failed: {tasks.in_a_line(error)}"
            failed = 1
        rows += new
        lines = [line(row, with_static) for row in new] or [f"| {name} | {problems[name]} |"]
        print("\n".join(lines), flush=True)
        if options.json:
            results = [{**vars(row), "ratio": row.ratio} for row in rows]
            text = json.dumps(dict(settings=settings, results=results, problems=problems), indent=1)
            options.json.write_text(text)
        if on_gpu():
            torch.cuda.empty_cache()
    if options.plot and rows:
        plot(rows, settings, options.plot)
    return failed


class Bench:
    """What the tasks run with. Exits where the model cannot be loaded or paged so."""

    def __init__(self, options: argparse.Namespace, device: torch.device, with_model: bool):
        self.device, self.dtype, self.repeats = device, DTYPES[options.dtype], options.repeats
        self.asked: dict[str, Any] = dict(block_size=options.block_size, kernel=options.kernel)
        self.model: Any = None
        self.pool_options = self.asked
        if with_model:
            try:
                self.model = load(options.model, self.dtype, options.random_weights).to(device)
            except (OSError, ValueError) as error:
                raise not_a_model(options.model, error) from None
            try:
                size = PagePool.for_model(self.model, num_blocks=1, **self.asked).block_size
            except ValueError as error:
                raise SystemExit(f"no pool for {options.model}: {error}") from None
            self.pool_options = {**self.asked, "block_size": size}  # the tasks size their pools by it

    def lacking(self, name: str) -> str | None:
        """What the model lacks for a task, None where it has all."""
        if name in WITHOUT_MODEL:
            return None
        pipeline = name in pipelines.PIPELINES
        needed = pipelines.positions_of(name) if pipeline else tasks.positions_of(name, self.repeats)
        limit = getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        return f"needs {needed} positions, the model has {limit}" if limit and needed > limit else None

    def run(self, name: str) -> list[Row]:
        """The rows of a task."""
        model, options, repeats, device = self.model, self.pool_options, self.repeats, self.device
        bar = lambda steps: tqdm(steps, desc=name, leave=False, disable=None)  # noqa: E731
        if name == "decode":
            return ops.run_decode(self.dtype, self.asked, repeats, bar, device)
        if name == "reorder":
            return [ops.run_reorder(repeats, bar, device)]
        if name == "kernels":
            return backends.run_kernels(self.dtype, repeats, bar, device)
        if name in pipelines.PIPELINES:
            return [pipelines.PIPELINES[name](model, options, repeats, bar)]
        if name in tasks.GENERATE:
            return [tasks.run_generate(name, model, options, repeats, bar, device.type != "cpu")]
        return [tasks.run_step(name, model, options, repeats, bar)]


def device_of(name: str) -> torch.device:
    """The device called so. Exits where there is none."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise SystemExit(f"--device {name} is not known: use cpu, cuda or cuda:N") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise SystemExit(
            f"--device {name}: torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices here"
        )
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    return device


def load(name: str, dtype: torch.dtype, random_weights: bool) -> Any:
    """The model, in evaluation mode, never stopping early."""
    if random_weights:
        config = transformers.AutoConfig.from_pretrained(name)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    model.generation_config = transformers.GenerationConfig(eos_token_id=None, pad_token_id=0)
    return model.eval()


def describe(options: argparse.Namespace) -> dict[str, Any]:
    """What a reader needs to judge the numbers."""
    device = torch.device(options.device)
    card = dict(device=torch.cuda.get_device_name(device)) if device.type == "cuda" else {}
    return dict(
        **card,
        model=options.model,
        dtype=options.dtype,
        threads=torch.get_num_threads(),
        repeats=options.repeats,
        torch=torch.__version__,
        transformers=transformers.__version__,
        processor=torch.backends.cpu.get_cpu_capability(),
        machine=platform.machine(),
        malloc={name: value for name, value in os.environ.items() if name.startswith("MALLOC_")} or "plain",
    )


def header(settings: dict[str, Any], with_static: bool) -> str:
    """The settings, and the head of a Markdown table; with a column for the static cache where that is measured."""
    head = f"| task | default |{' static, compiled |' if with_static else ''} hf_paged | ratio | "
    head += "KV bytes default / hf_paged | tokens, remarks |"
    return "\n".join(
        [
            ", ".join(f"{name} {value}" for name, value in settings.items()),
            "",
            head,
            "|---" * (head.count("|") - 1) + "|",
        ]
    )


def line(row: Row, with_static: bool) -> str:
    """A row of the table."""
    kv = row.notes.get("kv_bytes")
    size = f"{kv['default'] / 2**20:.0f} / {kv['paged'] / 2**20:.0f} MiB" if kv else ""
    remarks = "; ".join(_remark(name, value) for name, value in row.notes.items() if name not in ("kv_bytes", "static"))
    static = f" {row.notes['static']:.3f} {row.unit} |" if "static" in row.notes else " |" if with_static else ""
    ratio = "below noise" if row.ratio is None else f"{row.ratio:.2f}"
    times = f"{row.default:.3f} {row.unit} |{static} {row.paged:.3f} {row.unit} | {ratio}"
    return f"| {row.task} | {times} | {size} | {remarks} |"


def _remark(name: str, value: Any) -> str:
    if isinstance(value, dict):
        value = " / ".join(f"{number:.3f}" if isinstance(number, float) else str(number) for number in value.values())
    elif isinstance(value, float):
        value = f"{value:.2f}"
    return str(value) if name in ("tokens", "what") else f"{name} {value}"


def plot(rows: list[Row], settings: dict[str, Any], file: Path) -> None:
    """Ratios as bars."""
    from matplotlib.figure import Figure

    ratios = {row.task: row.ratio for row in rows if row.ratio is not None}
    figure = Figure(figsize=(8, 0.5 * len(ratios) + 1.5), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh(list(ratios), list(ratios.values()), color="#3b6ea8")
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.set_xlabel("times faster than the default cache")
    axes.set_title(
        f"{Path(str(settings['model'])).name}, {settings['dtype']}, {settings['threads']} threads", fontsize=10
    )
    figure.savefig(file, dpi=150)
