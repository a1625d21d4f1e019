"""Command line of the benchmarks: runs tasks, prints a table, writes JSON and a picture."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm.auto import tqdm

from .. import PagePool
from . import backends, ops, pipelines, tasks
from .measure import Row

TASKS = [*tasks.GENERATE, *pipelines.PIPELINES, *tasks.STEPS, "decode", "reorder"]
WITHOUT_MODEL = ("decode", "reorder", "kernels")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="a local folder or a Hub id; not needed for the tasks decode and reorder")
    parser.add_argument("--random-weights", action="store_true", help="build the model from its config alone")
    parser.add_argument("--task", action="append", choices=[*TASKS, "kernels"], help="may be repeated; default: all")
    parser.add_argument("--device", default="cpu", help="cpu (default), cuda or cuda:N; on a GPU also the task kernels")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--repeats", type=int, default=5, help="measured runs of each side (default 5)")
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's own choice)")
    parser.add_argument("--block-size", type=int, help="tokens per block (default: the pool's choice)")
    parser.add_argument("--kernel", help="backend (default: the pool's choice)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all runs and settings there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the ratios there (needs hf_paged[viz])")


def run(options: argparse.Namespace) -> int:
    """Run the chosen tasks. Returns the exit status."""
    device = device_of(options.device)
    chosen = options.task or (TASKS if device.type == "cpu" else [*TASKS, "kernels"])
    if options.threads:
        torch.set_num_threads(options.threads)
    dtype = DTYPES[options.dtype]
    pool_options = dict(block_size=options.block_size, kernel=options.kernel)
    needs_model = [name for name in chosen if name not in WITHOUT_MODEL]
    if needs_model and not options.model:
        raise SystemExit(f"--model is needed for {', '.join(needs_model)}: give a folder or a Hub id")
    model = load(options.model, dtype, options.random_weights).to(device) if needs_model else None
    if model is not None and device.type != "cpu" and not options.block_size:  # the tasks size their pools by it
        pool_options["block_size"] = PagePool.for_model(model, num_blocks=1, kernel=options.kernel).block_size

    rows: list[Row] = []
    for name in chosen:
        bar = lambda steps, name=name: tqdm(steps, desc=name, leave=False, disable=None)  # noqa: E731
        if name == "decode":
            rows += ops.run_decode(dtype, pool_options, options.repeats, bar, device)
        elif name == "reorder":
            rows.append(ops.run_reorder(options.repeats, bar, device))
        elif name == "kernels":
            rows += backends.run_kernels(dtype, options.repeats, bar, device)
        elif name in pipelines.PIPELINES:
            rows.append(pipelines.PIPELINES[name](model, pool_options, options.repeats, bar))
        elif name in tasks.GENERATE:
            rows.append(tasks.run_generate(name, model, pool_options, options.repeats, bar, device.type != "cpu"))
        else:
            rows.append(tasks.run_step(name, model, pool_options, options.repeats, bar))
    settings = describe(options)
    print(table(rows, settings))
    if options.json:
        results = [{**vars(row), "ratio": row.ratio} for row in rows]
        options.json.write_text(json.dumps(dict(settings=settings, results=results), indent=1))
    if options.plot:
        plot(rows, settings, options.plot)
    return 0


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


def table(rows: list[Row], settings: dict[str, Any]) -> str:
    """A Markdown table. With a column for the static cache where that was measured."""
    with_static = any("static" in row.notes for row in rows)
    lines = [
        ", ".join(f"{name} {value}" for name, value in settings.items()),
        "",
        f"| task | default |{' static, compiled |' if with_static else ''} hf_paged | ratio | KV bytes default / hf_paged | "
        "tokens, remarks |",
        "|---" * (7 if with_static else 6) + "|",
    ]
    for row in rows:
        kv = row.notes.get("kv_bytes")
        size = f"{kv['default'] / 2**20:.0f} / {kv['paged'] / 2**20:.0f} MiB" if kv else ""
        remarks = "; ".join(
            _remark(name, value) for name, value in row.notes.items() if name not in ("kv_bytes", "static")
        )
        static = f" {row.notes['static']:.3f} {row.unit} |" if "static" in row.notes else " |" if with_static else ""
        times = f"{row.default:.3f} {row.unit} |{static} {row.paged:.3f} {row.unit} | {row.ratio:.2f}"
        lines.append(f"| {row.task} | {times} | {size} | {remarks} |")
    return "\n".join(lines)


def _remark(name: str, value: Any) -> str:
    if isinstance(value, dict):
        value = " / ".join(f"{number:.3f}" if isinstance(number, float) else str(number) for number in value.values())
    elif isinstance(value, float):
        value = f"{value:.2f}"
    return str(value) if name in ("tokens", "what") else f"{name} {value}"


def plot(rows: list[Row], settings: dict[str, Any], file: Path) -> None:
    """Ratios as bars."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SystemExit("--plot needs matplotlib: pip install 'hf_paged[viz]'") from None
    rows = [row for row in rows if math.isfinite(row.ratio)]
    figure = Figure(figsize=(8, 0.5 * len(rows) + 1.5), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh([row.task for row in rows], [row.ratio for row in rows], color="#3b6ea8")
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.set_xlabel("times faster than the default cache")
    axes.set_title(
        f"{Path(str(settings['model'])).name}, {settings['dtype']}, {settings['threads']} threads", fontsize=10
    )
    figure.savefig(file, dpi=150)
