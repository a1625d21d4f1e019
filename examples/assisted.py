"""Assisted decoding and prompt lookup on SmolLM2-135M: the same tokens and the same acceptance over both caches.

    python examples/assisted.py

The draft model is the first layers of the model itself. Prints, for each mode and cache, how many tokens were drafted and
how many of them were accepted; exits with 1 where tokens or acceptance differ.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
from smollm2 import load
from transformers import DynamicCache

from hf_paged import PagedCache, PagePool
from hf_paged.compat import CACHE_NAME

NEW, LAYERS = 64, 24  # of 30: the first half of the model foretells nothing yet
STORY = "The cat sat on the mat. The dog sat on the rug. The cat sat on the mat. The dog sat on the"
REQUEST = "Repeat this list three times: apple, banana, cherry, date, elderberry."


def first_layers(model: Any) -> Any:
    """A draft model of the first layers of `model`, its embeddings and its head."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = LAYERS
    draft = type(model)(config).eval()
    draft.load_state_dict(model.state_dict(), strict=False)  # leaves out the layers that the draft does not have
    draft.generation_config = copy.deepcopy(model.generation_config)
    draft.generation_config.num_assistant_tokens = 5
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    return draft


def count(model: Any, inputs: dict[str, torch.Tensor], cache: Any, **mode: Any) -> tuple[list[int], int, int]:
    """New tokens, and how many of them were drafted and accepted: a pass over n new positions has verified n - 1 drafts."""
    passes: list[int] = []
    hook = model.lm_head.register_forward_pre_hook(lambda _, args: passes.append(args[0].shape[1]))
    try:
        out = model.generate(**inputs, max_new_tokens=NEW, do_sample=False, **{CACHE_NAME: cache}, **mode)
    finally:
        hook.remove()
    return out[0, inputs["input_ids"].shape[1] :].tolist(), sum(passes) - len(passes), NEW - len(passes)


def main() -> int:
    """Returns the exit status."""
    torch.set_grad_enabled(False)
    model, tokenizer = load(dtype=torch.float32)
    model.generation_config.eos_token_id = model.config.vocab_size  # never: all runs are equally long
    pool = PagePool.for_model(model, num_blocks=64)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": REQUEST}], tokenize=False, add_generation_prompt=True
    )
    modes: dict[str, tuple[str, dict[str, Any]]] = {
        f"draft of {LAYERS} layers": (STORY, dict(assistant_model=first_layers(model))),
        "prompt lookup": (STORY, dict(prompt_lookup_num_tokens=5)),
        "prompt lookup, chat": (chat, dict(prompt_lookup_num_tokens=5)),
    }
    failures = 0
    print("| mode | cache | drafted | accepted | rate |\n|---|---|---|---|---|")
    for name, (text, mode) in modes.items():
        inputs = dict(tokenizer(text, return_tensors="pt"))
        model.set_attn_implementation("sdpa")
        greedy = count(model, inputs, DynamicCache(config=model.config))[0]
        default = count(model, inputs, DynamicCache(config=model.config), **mode)
        model.set_attn_implementation("paged")
        with PagedCache(pool) as cache:
            paged = count(model, inputs, cache, **mode)
        for label, (tokens, drafted, accepted) in (("default", default), ("hf_paged", paged)):
            print(f"| {name} | {label} | {drafted} | {accepted} | {accepted / drafted:.2f} |", flush=True)
            failures += tokens != greedy
        failures += default != paged
    print("tokens and acceptance are equal" if not failures else "DIFFERENT")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
