"""One prompt, decoded in three ways, with the default cache and with hf_paged: the same tokens in less memory.

Runs SmolLM2-135M-Instruct in float32. Exits with an error if any token differs.
"""

import sys
import time
from typing import Any, NamedTuple

import torch
from smollm2 import load
from torch import Tensor

import hf_paged

ARTICLE = """\
The lighthouse at Carrow Point was built in 1874, after three ships were lost on the reef in a single winter. The tower \
is 31 metres high, of grey granite that was cut on the mainland and brought over in barges, and it took forty men five \
summers to finish it. The first keeper was Hannah Reed, a pilot's widow, who moved in with her two sons and a cow. She \
climbed the 162 steps every evening to light the lamp, wound the clockwork that turned the lens every four hours, and \
wrote down the weather, the passing ships and the price of oil in a journal that fills eleven volumes.

In November 1881 a storm broke the glass of the lantern room. Reed and her elder son held blankets against the wind for \
nine hours, so that the flame would not go out, and the mail steamer Aurora, with 84 people on board, found the channel \
by its light. The company that owned the steamer sent her a silver watch. She thanked them in one sentence and asked for \
thicker glass, which arrived the next spring.

The lamp burned oil until 1926, when a cable was laid from the village and electric light took its place. The last \
keeper left in 1988. Today the light is switched on by a sensor, the keeper's house is a small museum, and visitors who \
climb the tower are shown the journal, the watch, and a piece of the broken glass."""
REQUEST = "Write a postcard to a friend about a visit to Carrow Point."
MODES: dict[str, dict[str, Any]] = {
    "greedy chat": {"do_sample": False},
    "4 beams": {"num_beams": 4},
    "8 samples": {"do_sample": True, "temperature": 0.7, "num_return_sequences": 8},
}


class Run(NamedTuple):
    """What one call of `generate` gave and took."""

    tokens: Tensor  # [rows, prompt and new tokens]
    kv_bytes: int
    seconds: float


def with_default_cache(model: Any, options: dict[str, Any]) -> Run:
    """`generate` as it comes."""
    model.set_attn_implementation("sdpa")
    start = time.perf_counter()
    out = model.generate(**options)
    seconds = time.perf_counter() - start
    return Run(out.sequences, sum(layer.keys.nbytes + layer.values.nbytes for layer in out.cache.layers), seconds)


def with_paged_cache(model: Any, options: dict[str, Any]) -> tuple[Run, hf_paged.PoolStats]:
    """The same with a pool. One pool serves any number of calls; each gets its own here, so that the peak is its own."""
    model.set_attn_implementation("paged")  # or from_pretrained(..., attn_implementation="paged")
    pool = hf_paged.PagePool.for_model(model, memory="1GiB")
    with hf_paged.PagedCache(pool) as cache:
        start = time.perf_counter()

        out = model.generate(**options, cache=cache)  # <- the one change (`past_key_values=` up to transformers 5.20)

        seconds = time.perf_counter() - start
        stats = pool.stats()  # before the end of the `with` block gives all blocks back
    return Run(out.sequences, stats.peak_used * stats.bytes_per_block, seconds), stats


def main() -> str | None:
    """Returns what is wrong, None if nothing."""
    model, tokenizer = load(torch.float32)
    chat = [{"role": "user", "content": f"{ARTICLE}\n\n{REQUEST}"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    length = prompt["input_ids"].shape[1]
    print(f"Prompt: an article and a request, {length} tokens. {REQUEST}")

    # Fresh memory and kernels are slow at their first use: that is kept out of the times.
    warm_up = {**prompt, "max_new_tokens": 4, "return_dict_in_generate": True}
    with_default_cache(model, warm_up)
    with_paged_cache(model, warm_up)

    rows, different = [], []
    for name, mode in MODES.items():
        options = {**prompt, **mode, "max_new_tokens": 64, "return_dict_in_generate": True}
        torch.manual_seed(0)
        default = with_default_cache(model, options)
        torch.manual_seed(0)
        paged, stats = with_paged_cache(model, options)

        same = torch.equal(default.tokens, paged.tokens)
        different += [] if same else [name]
        texts = tokenizer.batch_decode(paged.tokens[:, length:], skip_special_tokens=True)
        print(f"\n{name} (tokens {'identical' if same else 'DIFFERENT'}):")
        for text in texts[:2] + ["..."] * (len(texts) > 2):
            print(" ", *text.split())
        rows.append(
            f"{name:<11}{default.kv_bytes / 2**20:8.1f}{paged.kv_bytes / 2**20:8.1f}"
            f"{default.kv_bytes / paged.kv_bytes:7.1f}{default.seconds:9.1f}{paged.seconds:8.1f}"
            f"{stats.peak_used:7}{stats.shared:8}{stats.cow_copies:8}{'yes' if same else 'NO':>11}"
        )

    print(f"\n{'':<11} keys and values, MiB           seconds     blocks of {stats.block_size} tokens")
    print(f"{'':<11} default   paged  ratio  default   paged   peak  shared  copied  identical")
    print(*rows, sep="\n")
    return f"hf_paged gave other tokens than the default cache: {', '.join(different)}" if different else None


if __name__ == "__main__":
    sys.exit(main())
