"""A place to stand around `generate`, and to exchange the cache that it makes: for `hf_paged.enable`.

Wraps       `generate` and `_prepare_cache_for_generation`, where the class of an enabled model defines them, which is
            `transformers.generation.GenerationMixin` for most. Only from the first `enable` on; HF_PAGED_PATCHES=0 has no
            say in it
Checked     transformers 5.0.0, 5.10.4, 5.17.0, 5.24.0
Acts        only on models that are enabled
Why         a pipeline or a trainer calls `generate` without a cache, and no hook lies between the reading of the generation
            config, which tells whether there is to be one, and the first forward pass. The class is wrapped rather than
            the model, whose attributes a copy of it would take along
Delete      when a model or a generation config can name a function that makes the cache
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

PARAMETERS = ["self", "generation_config", "model_kwargs"]


def apply(
    model_class: type,
    around: Callable[[Any], AbstractContextManager[Any]],
    preparing: Callable[[Any, Any, dict[str, Any]], AbstractContextManager[Any]],
) -> str | None:
    """Install the patch for the models of a class, once. Returns why not, where that is so.

    Every `generate` of such a model runs inside `around(model)`, and the making of its cache inside
    `preparing(model, generation_config, model_kwargs)`.
    """
    owners = {}
    for name in ("generate", "_prepare_cache_for_generation"):
        owner = next((base for base in model_class.__mro__ if name in vars(base)), None)
        if owner is None:
            return f"{model_class.__name__} has no {name} in this release of transformers"
        owners[name] = owner
    generate, prepare = (vars(owner)[name] for name, owner in owners.items())
    parameters = list(inspect.signature(prepare).parameters)
    if parameters[: len(PARAMETERS)] != PARAMETERS and "kwargs" not in parameters:
        return f"{model_class.__name__}._prepare_cache_for_generation has unknown parameters {parameters}"

    if not getattr(generate, "_hf_paged_enable", False):

        @functools.wraps(generate)
        def paged_generate(self: Any, *args: Any, **kwargs: Any) -> Any:
            with around(self):
                return generate(self, *args, **kwargs)

        paged_generate._hf_paged_enable = True  # type: ignore[attr-defined]
        owners["generate"].generate = paged_generate  # type: ignore[attr-defined]

    if not getattr(prepare, "_hf_paged_enable", False):

        @functools.wraps(prepare)  # models call it with names too, so ours are upstream's
        def paged_prepare(
            self: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
        ) -> Any:
            with preparing(self, generation_config, model_kwargs):
                return prepare(self, generation_config, model_kwargs, *args, **kwargs)

        paged_prepare._hf_paged_enable = True  # type: ignore[attr-defined]
        owners["_prepare_cache_for_generation"]._prepare_cache_for_generation = paged_prepare  # type: ignore[attr-defined]
    return None
