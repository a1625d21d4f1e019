"""What differs between the releases of transformers that hf_paged supports, in one place."""

from __future__ import annotations

import inspect

from transformers import LlamaForCausalLM

# The argument that takes a cache in a model's forward pass and in `generate`, and names it in outputs: `cache` in newer
# releases, `past_key_values` in older ones, and a deprecated alias for a while between.
CACHE_NAME = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
