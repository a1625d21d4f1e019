"""`python -m hf_paged doctor`: what is installed, which kernels that gives, and what would give better ones."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import warnings
from typing import Any, NamedTuple

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, DynamicCache

from . import __version__
from .kernels import BACKENDS, build
from .kernels.backend import WINDOW
from .kernels.choose import candidates, choose, problem_of
from .kernels.flash_find import PACKAGES
from .layout import LayerGeometry, OwnLayer, groups_of, layers_of, needs_of
from .pool import bytes_per_token

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
OPTIONAL = ["triton", *(package.distribution for package in PACKAGES.values()), "kernels"]


class Subject(NamedTuple):
    """What the kernels are asked about."""

    layers: list[LayerGeometry | OwnLayer]
    needs: set[str]
    dtype: torch.dtype

    @property
    def dims(self) -> list[tuple[int, int]]:
        return sorted({(layer.key_dim, layer.value_dim) for layer in self.layers if isinstance(layer, LayerGeometry)})

    def __str__(self) -> str:
        dims = ", ".join(str(key) if key == value else f"{key}/{value}" for key, value in self.dims)
        needs = f", with {', '.join(sorted(self.needs))}" if self.needs else ""
        return f"{str(self.dtype).removeprefix('torch.')}, head dim {dims}{needs}"


# Where no model is given.
TYPICAL = Subject([LayerGeometry(8, 128, 128)], set(), torch.bfloat16)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="a local folder or a Hub id; only its config is read, no weights")
    parser.add_argument("--dtype", choices=DTYPES, help="of keys and values (default: the model's own)")


def run(options: argparse.Namespace) -> int:
    """Print the report. Returns the exit status; exits where the model's config cannot be read."""
    print(report(options.model, DTYPES.get(options.dtype)))
    return 0


def not_a_model(name: str, error: Exception) -> SystemExit:
    """How a command ends that was given such a model."""
    reason = str(error).splitlines()[0].rstrip(".")
    return SystemExit(f"--model {name}: {reason}. Give a local folder with a config.json, or a Hub id")


def report(name: str | None = None, dtype: torch.dtype | None = None) -> str:
    """The whole text. `name` is a local folder or a Hub id, of which only the config is read; None: no model. Raises
    `SystemExit` where that does not tell."""
    lines, subject = versions(), TYPICAL
    if name is not None:
        try:
            subject = read_model(name)
        except (OSError, ValueError) as error:
            raise not_a_model(name, error) from None
        lines += ["", f"{name}: {subject}", *model_lines(subject)]
    subject = subject if dtype is None else subject._replace(dtype=dtype)
    for device, description in devices().items():
        lines += ["", f"{device}: {description}", *kernel_lines(device, subject)]
    return "\n".join(lines)


def versions() -> list[str]:
    """One line per package or tool that matters."""
    lines = [f"hf_paged {__version__}, python {platform.python_version()}"]
    lines.append(f"torch {torch.__version__}, transformers {transformers.__version__}")
    for package in OPTIONAL:
        try:
            lines.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            lines.append(f"{package}: not installed")
    try:
        lines.append(f"C++ compiler: {' '.join(build._compiler())}")
    except build.KernelUnavailable as error:
        lines.append(f"C++ compiler: none. {error}")
    return lines


def devices() -> dict[torch.device, str]:
    """The devices of this machine."""
    found = {torch.device("cpu"): f"{platform.machine()}, {torch.get_num_threads()} threads"}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found[torch.device("cuda", index)] = (
            f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
            f"{properties.total_memory / 2**30:.0f} GiB"
        )
    return found


def kernel_lines(device: torch.device, subject: Subject) -> list[str]:
    """What each backend says to the subject, what is picked, and what would have to change for a better one."""
    lines, better = [f"  kernels for {subject}:"], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a fast one is missing is said below
        choice = choose(None, None, device, subject.dtype, subject.dims, subject.needs)
    order = candidates(device)
    for name in order:
        backend = BACKENDS[name]
        problem = problem_of(name, device, subject.dtype, subject.dims, backend.block_size, subject.needs)
        if problem is None:
            what = ", ".join(filter(None, [backend.describe(), f"blocks of {backend.block_size}"]))
            features = ", ".join(sorted(backend.features))
            lines.append(f"    {name:<10} {what} tokens; {features}")
        else:
            lines.append(f"    {name:<10} no: {problem}")
            if order.index(name) < order.index(choice.kernel):
                better.append(problem)
    lines.append(f"  picked: {choice.kernel}, block_size={choice.block_size}")
    return lines + [f"  better would be: {problem}" for problem in better]


def read_model(name: str) -> Subject:
    """What a model keeps and asks for, from its config and its code: it is built without memory for its weights. Raises
    `OSError` where there is no config, `ValueError` where that does not tell."""
    config = AutoConfig.from_pretrained(name)
    auto: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(
            config, attn_implementation="eager"
        ).eval()  # sdpa looks into masks, which hold nothing
    layers, needs = layers_of(model), needs_of(model)
    kinds = DynamicCache(config=config).layers  # a model that did not run has told no windows
    for index, (layer, kind) in enumerate(zip(layers, kinds)):
        if isinstance(layer, LayerGeometry):
            layers[index] = layer._replace(window=getattr(kind, "sliding_window", None) or 0)
    if any(isinstance(layer, LayerGeometry) and layer.window for layer in layers):
        needs.add(WINDOW)
    return Subject(layers, needs, config.dtype or torch.bfloat16)


def model_lines(subject: Subject) -> list[str]:
    """What a token of the model takes."""
    paged = [layer for layer in subject.layers if isinstance(layer, LayerGeometry)]
    size = bytes_per_token(subject.layers, subject.dtype)
    lines = [f"  {len(paged)} of {len(subject.layers)} layers are paged, {size} bytes per token and group of layers:"]
    for group in groups_of(subject.layers):
        looks_back = f"looks back {group.window} tokens" if group.window else "keeps all tokens"
        lines.append(f"    a group of {len(group.layers)} layers {looks_back}")
    own = sorted({layer.name for layer in subject.layers if isinstance(layer, OwnLayer)})
    return lines + ([f"  not paged: {', '.join(own)}"] if own else [])
