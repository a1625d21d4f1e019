"""torch.compile: works around a PagedCache, with breaks in the graph, and only where somebody asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny import CACHE, default, make_pool, paged, prompts

from hf_paged import PagedCache

MODES: list[dict[str, Any]] = [{}, dict(num_beams=3), dict(do_sample=True, num_return_sequences=3)]


@pytest.fixture
def compiled(llama: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The model with `model.forward = torch.compile(model.forward)`."""
    forward = llama.forward
    llama.forward = torch.compile(forward, backend=request.param)
    try:
        yield llama
    finally:
        llama.forward = forward
        torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
@pytest.mark.parametrize(
    "compiled", ["eager", pytest.param("inductor", marks=pytest.mark.slow)], indirect=True, ids=["eager", "inductor"]
)
def test_compiled_forward(compiled: Any) -> None:
    inputs, pool = prompts([9, 5]), make_pool(compiled)
    got = [paged(compiled, inputs, pool, max_new_tokens=6, **flags) for flags in MODES]
    compiled.forward = compiled.forward._torchdynamo_orig_callable
    for out, flags in zip(got, MODES):
        assert torch.equal(default(compiled, inputs, max_new_tokens=6, **flags), out)


def test_nothing_compiles_by_itself(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where `generate` would do so for other caches: on a GPU, and with `compile_config`."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("torch.compile was called")

    monkeypatch.setattr(torch, "compile", refuse)
    inputs, pool = prompts([9, 5]), make_pool(llama)
    for flags in (*MODES, dict(prefill_chunk_size=4), dict(prompt_lookup_num_tokens=3, eos_token_id=160)):
        one = {name: value[:1] for name, value in inputs.items()} if "eos_token_id" in flags else inputs
        paged(llama, one, pool, max_new_tokens=4, **flags)
    monkeypatch.setattr(type(llama), "device", property(lambda self: torch.device("cuda")))
    config = llama.generation_config
    assert not llama._valid_auto_compile_criteria({CACHE: PagedCache(pool)}, config)
