"""What keys and values depend on beside the tokens: the model, its weights as they are now, its adapters."""

from __future__ import annotations

import hashlib
import itertools
import weakref
from typing import Any

import torch
from torch import Tensor

from .compat import autocast_dtype

SAMPLE = 16  # elements of each parameter
ADAPTER_STATE = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")  # of PEFT's layers

_serials: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_next_serial = itertools.count()


def fingerprint(model: Any, salt: str = "") -> bytes:
    """16 bytes that change when `model` is another one, when its weights change, and when an adapter is switched.

    A change is seen by each parameter's address, its version, which every in-place operation raises, and a few of its
    elements, since writes through `.data` and fused optimizers raise none. Costs a few microseconds per parameter.
    """
    serial = _serials.get(model)
    if serial is None:
        serial = _serials[model] = next(_next_serial)
    digest = hashlib.blake2b(repr((serial, salt, autocast_dtype(model.device))).encode(), digest_size=16)
    samples: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for weight in itertools.chain(model.parameters(), model.buffers()):
        version = 0 if weight.is_inference() else weight._version
        digest.update(repr((weight.data_ptr(), version)).encode())
        if weight.numel() and not weight.is_meta:
            flat = weight.detach().reshape(-1)
            samples.setdefault((flat.device, flat.dtype), []).append(flat[:: -(-len(flat) // SAMPLE)])
    for few in samples.values():
        digest.update(torch.cat(few).view(torch.uint8).cpu().numpy().tobytes())
    for module in model.modules():
        state = [getattr(module, name) for name in ADAPTER_STATE if hasattr(module, name)]
        if state:
            digest.update(repr(state).encode())
    return digest.digest()
