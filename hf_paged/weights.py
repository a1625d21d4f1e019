"""What keys and values depend on beside the tokens: the model, its weights as they are now, its adapters."""

from __future__ import annotations

import hashlib
import itertools
import logging
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .compat import autocast_dtype

logger = logging.getLogger(__name__)

SAMPLES = 32  # elements of each parameter, about
GOLDEN_SECTION = 0.618
ADAPTER_STATE = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")  # of PEFT's layers

_serials: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_next_serial = itertools.count()


def fingerprint(model: Any, salt: str = "") -> bytes | None:
    """16 bytes that change when `model` is another one, when its weights change, when an adapter is switched, and when the
    `forward` of one of its modules is replaced. None where some weight cannot be read.

    A change of a weight is seen by its address, its version, which every in-place operation raises, and a few of its
    elements, since writes through `.data` and fused optimizers raise none: of such a write to a few rows, or to a weight
    that is offloaded, nothing may be seen. Costs a few microseconds per parameter.
    """
    try:
        return _digest(model, salt)
    except Exception as error:  # what a tensor of a class of its own can do is for that class to say
        logger.info("no prefixes are kept of %s, whose weights cannot be read: %s", type(model).__name__, error)
        return None


@torch.no_grad()
def _digest(model: Any, salt: str) -> bytes:
    facts: list[Any] = [_serial(model), salt, autocast_dtype(model.device)]
    samples: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for module in model.modules():
        attributes = vars(module)
        for weight in (*module._parameters.values(), *module._buffers.values()):
            for part in () if weight is None else _parts(weight):
                facts += [part.data_ptr(), 0 if part.is_inference() else part._version]
                if part.numel() and not part.is_meta:
                    samples.setdefault((part.device, part.dtype), []).append(_sample(part))
        facts += [(name, attributes[name]) for name in ADAPTER_STATE if name in attributes]
        if "forward" in attributes:
            facts.append(("forward", _serial(attributes["forward"])))
    digest = hashlib.blake2b(repr(facts).encode(), digest_size=16)
    for few in samples.values():
        digest.update(torch.cat(few).view(torch.uint8).cpu().numpy().tobytes())
    return digest.digest()


def _serial(thing: Any) -> int:
    """A number of its own for every object that there has been; an address may come again."""
    serial = _serials.get(thing)
    if serial is None:
        serial = _serials[thing] = next(_next_serial)
    return serial


def _parts(weight: Tensor) -> Iterator[Tensor]:
    """The plain tensors that a quantized or a distributed one is made of, of this process."""
    if not hasattr(weight, "__tensor_flatten__"):
        yield weight
        return
    for part in (getattr(weight, name) for name in weight.__tensor_flatten__()[0]):
        if isinstance(part, Tensor):  # a distributed one names its mesh, too
            yield from _parts(part)


def _sample(weight: Tensor) -> Tensor:
    if weight.itemsize == 1 and not weight.is_quantized:  # of many such dtypes, torch can copy none but the oldest
        weight = weight.view(torch.uint8)
    step = sample_step(weight)
    if weight.is_contiguous():
        return weight.view(-1)[::step]
    return weight.take(torch.arange(0, weight.numel(), step, device=weight.device))  # `reshape` would copy all of it


def sample_step(weight: Tensor) -> int:
    """How many elements lie from one sample to the next. The column moves on by the golden section of a row, so that samples
    spread over rows and columns alike (the additive recurrence of Weyl)."""
    step = -(-weight.numel() // SAMPLES)
    row = weight.shape[-1] if weight.dim() else 1
    return step + ((round(GOLDEN_SECTION * row) | 1) - step) % row if step > row else step
