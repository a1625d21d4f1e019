"""The tasks that run a whole model: `generate` in several modes, and single decode steps on a long context."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache

from .. import LayerGeometry, PagedCache, PagePool
from ..compat import CACHE_NAME
from .measure import COMPILED_WARM_UPS, Row, interleave, median


class Task(NamedTuple):
    """A call of `generate`."""

    lengths: list[int]  # of the prompts, left-padded to one batch
    flags: dict[str, Any]
    new: int = 64


class StepTask(NamedTuple):
    """Single decode steps with `rows` rows of `context` cached tokens."""

    rows: int
    context: int


GENERATE: dict[str, Task] = {
    "samples": Task([1024], dict(do_sample=True, num_return_sequences=8)),
    "beams": Task([2048], dict(num_beams=8)),
    "beams-small": Task([512], dict(num_beams=4)),
    "batch": Task([1024] * 8, {}),
    "ragged": Task(list(range(64, 1024, 60)), {}),
    "long": Task([4000], {}),
}
STEPS: dict[str, StepTask] = {"step-8x1024": StepTask(8, 1024), "step-16x2048": StepTask(16, 2048)}
STATIC = (
    "batch",
    "long",
    "beams-small",
)  # on GPUs also with transformers' static cache, whose forward pass it compiles
STEP_FLOOR = 16  # tokens of context of the step that both sides are compared with
Progress = Callable[[Any], Any]


def prompts(vocabulary: int, lengths: list[int], seed: int = 0) -> dict[str, Tensor]:
    """Random left-padded prompts, input_ids and attention_mask [B, width]."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, -length:] = torch.randint(3, vocabulary, (length,), generator=generator)
        mask[row, -length:] = 1
    return dict(input_ids=ids, attention_mask=mask)


def kv_bytes(cache: Any) -> int:
    """Bytes of the keys and values that a default cache holds."""
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def blocks_for(task: Task, block_size: int) -> int:
    """Enough blocks for a task, had no row anything in common with another."""
    rows = max(task.flags.get("num_beams", 1), task.flags.get("num_return_sequences", 1))
    return rows * sum(-(-(length + task.new) // block_size) + 1 for length in task.lengths)


def run_generate(
    name: str, model: Any, pool_options: dict[str, Any], repeats: int, progress: Progress, with_static: bool = False
) -> Row:
    """`generate` with a fresh default cache under "sdpa" and with a fresh `PagedCache` under "paged"; with the static cache
    too, where asked for and the task is one of `STATIC`."""
    task = GENERATE[name]
    inputs = prompts(model.config.get_text_config().vocab_size, task.lengths)
    inputs = {key: value.to(model.device) for key, value in inputs.items()}
    num_blocks = blocks_for(task, pool_options["block_size"] or 16)
    # Each repetition computes its prompts anew.
    pool = PagePool.for_model(model, num_blocks=num_blocks, prefix_caching=False, **pool_options)
    length = dict(max_new_tokens=task.new, min_new_tokens=task.new, pad_token_id=0)
    seen: dict[str, Tensor] = {}
    bytes_of: dict[str, int] = {}

    def default() -> None:
        model.set_attn_implementation("sdpa")
        torch.manual_seed(0)
        out = model.generate(**inputs, **length, **task.flags, return_dict_in_generate=True)
        seen["default"], bytes_of["default"] = out.sequences, kv_bytes(out[CACHE_NAME])

    def paged() -> None:
        model.set_attn_implementation("paged")
        torch.manual_seed(0)
        with PagedCache(pool) as cache:
            seen["paged"] = model.generate(**inputs, **length, **task.flags, **{CACHE_NAME: cache})
        bytes_of["paged"] = pool.stats().peak_used * pool.bytes_per_block

    problem = None

    def static() -> None:
        nonlocal problem
        if problem:
            return
        model.set_attn_implementation("sdpa")
        torch.manual_seed(0)
        try:
            model.generate(**inputs, **length, **task.flags, cache_implementation="static")
        except Exception as error:  # not every model or mode runs with it
            problem = in_a_line(error)

    ways = dict(default=default, paged=paged)
    if with_static and name in STATIC:
        for _ in range(COMPILED_WARM_UPS - 1):  # the last one with the others
            static()
        ways["static"] = static
    seconds = interleave(ways, repeats, progress, collect=True)
    notes: dict[str, Any] = dict(
        kv_bytes=bytes_of, tokens=agreement(seen["default"], seen["paged"], max(task.lengths)), kernel=pool.kernel
    )
    if problem:
        notes["static_cache_failed"] = problem
    elif "static" in seconds:
        notes["static"] = median(seconds["static"])
    return Row(
        name,
        median(seconds["default"]),
        median(seconds["paged"]),
        default_runs=seconds["default"],
        paged_runs=seconds["paged"],
        notes=notes,
    )


def positions_of(name: str, repeats: int) -> int:
    """Positions that a task of `GENERATE` or `STEPS` asks of a model."""
    if name in GENERATE:
        return max(GENERATE[name].lengths) + GENERATE[name].new
    return STEPS[name].context + _steps_of(repeats)


def in_a_line(error: Exception) -> str:
    """What went wrong, for a cell of a table."""
    return f"{type(error).__name__}: {error}".splitlines()[0].replace("|", "/")


def agreement(want: Tensor, got: Tensor, prompt: int) -> str:
    """ "identical", or how many of the new tokens agree before the first difference of each row."""
    if torch.equal(want, got):
        return "identical"
    same = (want[:, prompt:] == got[:, prompt:]).long().cumprod(1).sum(1)
    return f"{int(same.sum())} of {got[:, prompt:].numel()} up to the first difference"


def _steps_of(repeats: int) -> int:
    """Decode steps of a task of `STEPS`, the one that warms up included."""
    return 4 * repeats + 1


@torch.no_grad()
def run_step(name: str, model: Any, pool_options: dict[str, Any], repeats: int, progress: Progress) -> Row:
    """What cache and attention add to a decode step: the time of a step on a long context minus that of one on a short context
    right before it."""
    task, sides = STEPS[name], ("default", "paged")
    ways = {
        (side, context): step
        for context in (STEP_FLOOR, task.context)
        for side, step in _steps(model, task.rows, context, pool_options, repeats).items()
    }
    seconds = interleave(ways, 4 * repeats, progress)
    long, short = ({side: seconds[side, context] for side in sides} for context in (task.context, STEP_FLOOR))
    cost = {side: median(a - b for a, b in zip(long[side], short[side])) for side in sides}
    notes = dict(
        step={side: median(long[side]) for side in sides},
        floor={side: median(short[side]) for side in sides},
        what=f"step minus the same step at {STEP_FLOOR} tokens of context",
    )
    return Row(name, cost["default"], cost["paged"], "s", notes=notes)


def _steps(
    model: Any, rows: int, context: int, pool_options: dict[str, Any], repeats: int
) -> dict[str, Callable[[], None]]:
    """A decode step on random keys and values, per cache; the context grows by one token at each."""
    per_row = -(-(context + _steps_of(repeats)) // (pool_options["block_size"] or 16))
    pool = PagePool.for_model(model, num_blocks=rows * per_row, **pool_options)
    caches: dict[str, Any] = dict(default=DynamicCache(config=model.config), paged=PagedCache(pool))
    for index, layer in enumerate(pool.layers):
        if not isinstance(layer, LayerGeometry):
            continue
        dims = (layer.key_dim, layer.value_dim)
        key, value = (
            torch.randn(rows, layer.kv_heads, context, dim, dtype=pool.dtype, device=model.device) for dim in dims
        )
        for cache in caches.values():
            cache.update(key, value, index)
    tokens = torch.randint(3, model.config.get_text_config().vocab_size, (rows, 1), device=model.device)

    def step(side: str, attention: str) -> Callable[[], None]:
        def run() -> None:
            model.set_attn_implementation(attention)
            model(tokens, logits_to_keep=1, **{CACHE_NAME: caches[side]})

        return run

    return dict(default=step("default", "sdpa"), paged=step("paged", "paged"))
