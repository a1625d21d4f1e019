"""Layers on several devices: what accelerate's hooks do to the arguments of a layer, without a second device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import default, make_pool, paged, prompts

from hf_paged import packing
from hf_paged.kernels import KERNELS
from hf_paged.lazy import LazyMask


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_every_layer_stays_with_the_kernel(
    kind: str, model_of: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mask is moved before each layer but the first one. On "meta" nothing could be read of it."""
    model, inputs, calls = model_of(kind), prompts([20, 9, 14]), []

    def moved(module: Any, args: Any, kwargs: Any) -> Any:
        if kwargs.get("attention_mask") is not None:
            kwargs["attention_mask"] = kwargs["attention_mask"].to("meta", non_blocking=True)
        return args, kwargs

    original = KERNELS["cpu"]
    monkeypatch.setitem(KERNELS, "cpu", lambda *args: calls.append(1) or original(*args))
    monkeypatch.setattr(packing, "_padded_only", set())
    want = default(model, inputs, "eager", max_new_tokens=8)
    hooks = [layer.register_forward_pre_hook(moved, with_kwargs=True) for layer in model.model.layers[1:]]
    try:
        assert torch.equal(want, paged(model, inputs, make_pool(model), max_new_tokens=8))
    finally:
        for hook in hooks:
            hook.remove()
    assert len(calls) == 8 * 3 and not packing._padded_only


def test_a_moved_mask_is_the_same_mask() -> None:
    contents = torch.tensor([[[[True, False], [True, True]]]])
    mask = LazyMask(None, (1, 1, 2, 2), torch.bool, "meta", 3, 4, lambda: contents)  # type: ignore[arg-type]
    there = mask.to("cpu")
    assert isinstance(there, LazyMask) and there.device.type == "cpu" and there.shape == mask.shape
    assert (there.window, there.chunk_size, there.dtype) == (3, 4, torch.bool) and mask._dense is None
    assert (there | False).tolist() == contents.tolist()
    additive = there.to("cpu", torch.float32)
    assert type(additive) is torch.Tensor and additive.tolist() == contents.float().tolist()
