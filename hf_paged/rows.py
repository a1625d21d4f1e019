"""Which rows of a call of `generate` are equal, so that one of them is computed for all."""

from __future__ import annotations

import copy
import re
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from . import packing
from .blocks import Int64
from .cache import PagedCache

CACHE_NAMES = ("cache", "past_key_values")
# Arguments that are known to act on each row alone, and to be [B, ...] or the same for all rows. With any other one
# present, rows of equal tokens may still differ, and nothing is shared.
ROW_WISE = {"attention_mask", "position_ids", "token_type_ids", "decoder_attention_mask", "decoder_position_ids"}
ENCODED = "encoder_outputs"  # an output of the encoder, whose tensors are row-wise
# Modules that draw random numbers in training, and words in the names of the numbers, > 0, that make others do so.
DROPOUT = torch.nn.modules.dropout._DropoutNd
RANDOM = re.compile("drop|jitter|noise")
SAME_FOR_ALL = {"use_cache", "logits_to_keep", "output_attentions", "output_hidden_states", "return_dict"}
# Whose hooks treat every token by itself.
OWN_CODE = re.compile(r"(torch|transformers|accelerate|hf_paged)\b")
FSDP = "torch.distributed.fsdp."


def draws_at_random(model: Any) -> bool:
    """Whether rows of equal content may come out different, since dropout or the like is in force. Reinforcement learning
    generates in training mode, mostly without any."""
    training = [module for module in model.modules() if module.training]
    if any(isinstance(module, torch.nn.modules.batchnorm._BatchNorm) for module in training):
        return True
    configs = {id(config): config for module in training if (config := vars(module).get("config")) is not None}
    named = [vars(module) for module in training]
    named += [vars(config) for config in configs.values() if isinstance(config, PreTrainedConfig)]
    return any(isinstance(module, DROPOUT) and module.p > 0 for module in training) or any(
        isinstance(value, (int, float)) and value > 0
        for values in named
        if RANDOM.search(" ".join(values))  # few have any
        for name, value in values.items()
        if RANDOM.search(name)
    )


def is_instrumented(model: Any) -> bool:
    """Whether the forward passes that `generate` makes have to be those that it makes by itself, each with one row for each of
    the caller's and with all tokens of the prompt, since code of somebody else's sees them: a forward hook, as for steering,
    for capturing activations or for PEFT's `adapter_names`; another `prepare_inputs_for_generation`, as for PEFT's prompt
    tuning; FSDP, whose processes have to make equally many."""
    prepare = vars(model).get("prepare_inputs_for_generation")
    if prepare is not None and getattr(prepare, "__func__", None) is not type(model).prepare_inputs_for_generation:
        return True  # PEFT leaves the class's own one behind
    modules, code = list(model.modules()), []
    for module in modules:
        code += [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    return any(not OWN_CODE.match(item.__module__ or "") for item in code) or any(
        type(module).__module__.startswith(FSDP) for module in modules
    )


def equal_rows(input_ids: Tensor, model_kwargs: dict[str, Any], cache: PagedCache) -> tuple[Int64, Int64] | None:
    """Which rows are equal in all that the model sees of them: `first` [U], a representative of each group, and
    `inverse` [B], the group of each row. None where no two rows are provably equal."""
    batch = input_ids.shape[0]
    if input_ids.dim() != 2 or batch < 2:
        return None
    per_row = [input_ids]
    for name, value in model_kwargs.items():
        if name in CACHE_NAMES or name in SAME_FOR_ALL or packing.says_nothing(value):
            continue
        if name == ENCODED and isinstance(value, dict):
            # Tuples of hidden states and attentions, kept for the caller, are not repeated for beams: nobody reads them.
            values = [item for item in value.values() if isinstance(item, Tensor)]
        elif name in ROW_WISE and isinstance(value, Tensor):
            values = [value]
        else:
            return None
        if not all(item.shape[_row_axis(name, item)] in (1, batch) for item in values):
            return None
        per_row += [item.movedim(_row_axis(name, item), 0) for item in values if _is_per_row(name, item, batch)]
    keys: list[list[Any]] = [which_row(item) for item in per_row]
    for half in (cache, cache.cross_attention):
        if half is not None and half.num_rows:
            keys.append(half._state.row_keys())
            if len(keys[-1]) != batch:
                return None  # the forward pass says so in a sentence
    groups: dict[tuple[Any, ...], int] = {}
    inverse = np.array([groups.setdefault(key, len(groups)) for key in zip(*keys)])
    if len(groups) == batch:
        return None
    return np.unique(inverse, return_index=True)[1], inverse


def which_row(values: Tensor) -> list[int]:
    """A number per row of `values` [B, ...], the same for two rows exactly when they are equal bit by bit.

    Equal rows mostly stand side by side, as `generate` repeats them: one comparison of neighbours on the device, and only
    the first row of each run goes to the host.
    """
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    flat = values.detach().reshape(len(values), -1).contiguous().view(bits)
    starts = torch.ones(len(flat), dtype=torch.bool, device=flat.device)
    starts[1:] = (flat[1:] != flat[:-1]).any(1)
    numbers: dict[bytes, int] = {}
    heads = [numbers.setdefault(row.tobytes(), len(numbers)) for row in flat[starts].cpu().numpy()]
    return [heads[run] for run in (starts.cumsum(0) - 1).tolist()]


def chosen_rows(name: str, value: Any, rows: Tensor, batch: int) -> Any:
    """The given rows of an argument."""
    if isinstance(value, dict):
        few = copy.copy(value)
        for part, item in value.items():
            few[part] = chosen_rows(part, item, rows, batch)
        return few
    if not _is_per_row(name, value, batch):
        return value
    return value.index_select(_row_axis(name, value), rows.to(value.device))


def _row_axis(name: str, value: Tensor) -> int:
    """Where the rows stand in a row-wise argument. Positions among images are [3 or 4, B, S], one for each direction."""
    return 1 if name == "position_ids" and value.dim() == 3 else 0


def _is_per_row(name: str, value: Any, batch: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape[_row_axis(name, value)] == batch


def repeat_rows(outputs: Any, inverse: Tensor, shared: int) -> Any:
    """Give every tensor of a model output that has one entry per computed row one per row of the caller."""

    def repeat(value: Any) -> Any:
        if isinstance(value, Tensor) and value.dim() and value.shape[0] == shared:
            return value[inverse.to(value.device)]
        if isinstance(value, (tuple, list)):
            return type(value)(repeat(item) for item in value)
        return value

    for name, value in list(outputs.items()):
        outputs[name] = repeat(value)
    return outputs
