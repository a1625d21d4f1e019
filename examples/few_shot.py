"""A few-shot evaluation: one long preamble of worked examples, many short questions, in batches, a few new tokens each.

The loop is that of an evaluation harness and knows nothing of hf_paged; `enable` pages what it generates. Runs
SmolLM2-135M-Instruct with the default cache and with hf_paged in turn, and exits with an error if any answer differs in
float32; in bfloat16 two sums of one kind in another order may round a close decision the other way, so they are counted.
"""

import argparse
import contextlib
import random
import statistics
import sys
import time
from typing import Any

import torch
from smollm2 import load

import hf_paged

THINGS = ["apples", "pencils", "marbles", "stamps", "buttons", "shells", "coins", "cards"]
NAMES = ["Anna", "Ben", "Clara", "David", "Ella", "Frank", "Grace", "Henry"]


def task(generator: random.Random) -> tuple[str, int]:
    """A question of about 50 tokens, and its answer."""
    name, other = generator.sample(NAMES, 2)
    thing, (had, got, gave) = generator.choice(THINGS), (generator.randint(10, 60) for _ in range(3))
    return (
        f"Question: {name} had {had} {thing} in a box. On Monday {other} brought {got} more {thing}, and on Friday {name} "
        f"gave {min(gave, had)} of them away. How many {thing} are in the box now?\nAnswer:",
        had + got - min(gave, had),
    )


def evaluate(model: Any, tokenizer: Any, prompts: list[str], batch_size: int, new_tokens: int) -> list[str]:
    """The answers, a batch at a time."""
    answers: list[str] = []
    for start in range(0, len(prompts), batch_size):
        batch = tokenizer(prompts[start : start + batch_size], return_tensors="pt", padding=True)
        out = model.generate(**batch, max_new_tokens=new_tokens, do_sample=False)
        answers += tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return answers


def main() -> str | None:
    """Returns what is wrong, None if nothing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=1, help="timed runs of each kind, after one to warm up")
    parser.add_argument("--preamble", type=int, default=1000, help="about as many tokens of worked examples")
    parser.add_argument("--questions", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=10)
    parser.add_argument("--new-tokens", type=int, default=4)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--memory", default="1GiB", help="of the pool")
    options = parser.parse_args()

    model, tokenizer = load(getattr(torch, options.dtype), attn_implementation="sdpa")
    generator, preamble = random.Random(0), ""
    while len(tokenizer(preamble)["input_ids"]) < options.preamble:
        preamble += "{} {}\n\n".format(*task(generator))
    questions, solutions = zip(*(task(generator) for _ in range(options.questions)))
    prompts = [preamble + question for question in questions]
    lengths = [len(tokenizer(text)["input_ids"]) for text in (preamble, questions[0])]
    print(f"{len(prompts)} questions of about {lengths[1]} tokens behind {lengths[0]} tokens of examples")

    answers: dict[str, list[str]] = {}
    seconds: dict[str, list[float]] = {"default": [], "enabled": []}
    pool = hf_paged.PagePool.for_model(model, memory=options.memory)  # one for all runs
    for repeat in range(options.repeats + 1):
        for kind, times in seconds.items():
            pool.clear_prefix_cache()  # no run profits from the one before
            start = time.perf_counter()
            with hf_paged.enable(model, pool) if kind == "enabled" else contextlib.nullcontext():
                found = evaluate(model, tokenizer, prompts, options.batch_size, options.new_tokens)
            if repeat:
                times.append(time.perf_counter() - start)
            if answers.setdefault(kind, found) != found:
                return f"{kind}: the answers changed from one run to the next"

    right = sum(str(solution) in answer for answer, solution in zip(answers["enabled"], solutions))
    medians = {kind: statistics.median(times) for kind, times in seconds.items()}
    stats = pool.stats()
    print(
        f"{right} of {len(prompts)} right, for instance: {questions[0].split('?')[0]}? {answers['enabled'][0].strip()}"
    )
    print(f"default {medians['default']:.2f} s, enabled {medians['enabled']:.2f} s (medians of {options.repeats})")
    print(f"ratio {medians['default'] / medians['enabled']:.2f}")
    print(
        f"peak {stats.peak_used} blocks, {stats.peak_used * stats.bytes_per_block / 2**20:.1f} MiB of keys and values"
    )
    same = sum(one == other for one, other in zip(answers["default"], answers["enabled"]))
    print(f"{same} of {len(prompts)} answers identical")
    if same < len(prompts) and options.dtype == "float32":
        return "hf_paged gave other answers than the default cache"
    return None


if __name__ == "__main__":
    sys.exit(main())
