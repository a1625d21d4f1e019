"""TRL's GRPOTrainer, its generation paged by `enable`: the same completions and weights, the prompt stored once.

Trains a tiny random llama for a few steps on a CPU in float32, without and with hf_paged, from the same seeds. Needs
`pip install trl`. Prints generation times and peak keys and values; exits with an error if a completion differs.
"""

import argparse
import contextlib
import sys
import tempfile
import time
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

import hf_paged

BLOCK_SIZE = 16


class Run(NamedTuple):
    """What one training gave and took."""

    completions: list[Any]
    weights: list[torch.Tensor]
    seconds: float  # in `generate`
    stats: hf_paged.PoolStats | None


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte."""
    tokens = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    inner = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", padding_side="left")


def train(paged: bool, options: argparse.Namespace) -> Run:
    """A few steps of GRPO."""
    torch.manual_seed(0)
    size = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8}
    special = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=258, num_key_value_heads=2, initializer_range=0.1, **size, **special)
    )
    completions: list[Any] = []

    def reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        completions.append([list(ids) for ids in completion_ids])
        return [float(len(set(ids))) for ids in completion_ids]

    prompts = [f"Problem {index}. " + "Think step by step. " * (options.prompt // 20) for index in range(options.steps)]
    with tempfile.TemporaryDirectory() as folder:
        rows = {"per_device_train_batch_size": options.samples, "num_generations": options.samples}
        quiet = {"report_to": [], "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}
        length = {"max_steps": options.steps, "max_completion_length": options.new_tokens, "seed": 0}
        trainer = GRPOTrainer(
            model=model,
            args=GRPOConfig(folder, use_cpu=True, bf16=False, learning_rate=1e-3, **rows, **quiet, **length),
            reward_funcs=reward,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=byte_tokenizer(),
        )
        seconds = [0.0]
        with contextlib.ExitStack() as stack:
            handle = stack.enter_context(hf_paged.enable(trainer.model, block_size=BLOCK_SIZE)) if paged else None
            generate = model.generate

            def timed(*args: Any, **kwargs: Any) -> Any:
                start = time.perf_counter()
                out = generate(*args, **kwargs)
                seconds[0] += time.perf_counter() - start
                return out

            model.generate = timed
            trainer.train()
    weights = [parameter.detach() for parameter in model.parameters()]
    return Run(completions, weights, seconds[0], handle.pool.stats() if handle else None)


def main() -> str | None:
    """Returns what is wrong, None if nothing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=200, help="about as many tokens in each prompt")
    parser.add_argument("--new-tokens", type=int, default=32)
    options = parser.parse_args()
    default, paged = train(False, options), train(True, options)
    stats = paged.stats
    assert stats is not None
    longest = max(len(ids) for step in default.completions for ids in step) + options.prompt
    every_row = options.samples * -(-longest // BLOCK_SIZE)
    print(f"generation: default {default.seconds:.2f} s, enabled {paged.seconds:.2f} s", end=", ")
    print(f"ratio {default.seconds / paged.seconds:.2f}")
    print(f"peak blocks: {stats.peak_used}, with every row on its own about {every_row}")
    same = default.completions == paged.completions
    drift = max(float((a - b).abs().max()) for a, b in zip(default.weights, paged.weights))
    print(f"completions {'identical' if same else 'DIFFERENT'}, largest difference of a weight {drift:.1e}")
    return None if same else "hf_paged gave other completions than the default cache"


if __name__ == "__main__":
    sys.exit(main())
