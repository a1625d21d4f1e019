"""What the tests of `enable` share: a model that must be left as it was, and what its forward passes see."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from tiny import CACHE, poison

import hf_paged


@contextlib.contextmanager
def untouched(model: Any, attention: Any = "sdpa") -> Iterator[Any]:
    """The model under another attention implementation, as a caller has it who knows nothing of us. At the end it must be
    what it was."""
    model.set_attn_implementation(attention)
    before = state_of(model)
    yield model
    assert state_of(model) == before, "the model was changed"


def state_of(model: Any) -> Any:
    """What `enable` must not change: attributes and weights, configs, attention implementations, generation config."""
    modules = [
        (name, type(module), {**noted(vars(module)), "generation_config": None})
        for name, module in model.named_modules()
    ]
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    return modules, [noted(vars(config)) for config in configs.values()], model.generation_config.to_dict()


def noted(value: Any) -> Any:
    """A value to compare with itself later: contents where that is simple, else which object it is."""
    if isinstance(value, torch.Tensor):
        content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return id(value), value.dtype, value.shape, value.requires_grad, content
    if isinstance(value, dict):
        return {key: noted(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [noted(item) for item in value]
    return value if isinstance(value, (int, float, str, type(None))) else id(value)


def enabled(model: Any, num_blocks: int = 400, block_size: int = 4, **kwargs: Any) -> Any:
    handle = hf_paged.enable(model, num_blocks=num_blocks, block_size=block_size, **kwargs)
    poison(handle.pool)
    return handle


def generate(model: Any, inputs: dict[str, Any], **flags: Any) -> Any:
    torch.manual_seed(0)
    flags = {"max_new_tokens": 12, **flags}
    return model.generate(**inputs, **{name: value for name, value in flags.items() if value is not None})


class Spy:
    """Caches, and attention implementations of the decoder, of every forward pass."""

    def __init__(self, model: Any):
        self.caches: list[Any] = []
        self.attention: list[str] = []
        self.model = model
        self.hook = model.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self.caches.append(type(kwargs.get(CACHE)))
        self.attention.append(module.config.get_text_config(decoder=True)._attn_implementation)

    def __enter__(self) -> Spy:
        return self

    def __exit__(self, *exc: object) -> None:
        self.hook.remove()
