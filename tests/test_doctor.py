"""`python -m hf_paged doctor`: right about this machine, about machines it has not seen, and about models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from flash_doubles import FlashAttn2, Missing
from transformers import AutoModelForCausalLM, BartConfig, Gemma2Config, GptOssConfig, LlamaConfig, MambaConfig

from hf_paged import PagePool, doctor
from hf_paged.__main__ import main
from hf_paged.kernels import BACKENDS, flash_find
from hf_paged.kernels import choose as choosing
from hf_paged.kernels.flash import Flash2, Flash3, Flash4

SIZE: dict[str, Any] = dict(hidden_size=64, intermediate_size=32, num_hidden_layers=4, vocab_size=50)
HEADS: dict[str, Any] = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=24)


def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert f"torch {torch.__version__}, transformers" in text and "flash-attn-3" in text
    assert "kernels for bfloat16, head dim 128:" in text
    assert "cpu        compiled for" in text and "picked: cpu, block_size=16" in text
    assert "better would be" not in text.partition("\ncpu: ")[2].partition("\ncuda")[0]


def test_a_model(tmp_path: Path) -> None:
    """From the config alone, and what the pool of the real model says."""
    config = Gemma2Config(**SIZE, **HEADS, sliding_window=8, dtype="float16")
    config.save_pretrained(tmp_path)
    subject = doctor.read_model(str(tmp_path))
    pool = PagePool.for_model(AutoModelForCausalLM.from_config(config), num_blocks=2)
    assert subject.layers == pool.layers and subject.needs == {"softcap", "window"}
    assert subject.dtype == pool.dtype == torch.float16
    text = doctor.report(str(tmp_path))
    assert "float16, head dim 24, with softcap, window" in text
    assert f"4 of 4 layers are paged, {pool.bytes_per_block // 16} bytes per token and group of layers" in text
    assert "a group of 2 layers keeps all tokens" in text and "a group of 2 layers looks back 8 tokens" in text
    assert "kernels for float32, head dim 24" in doctor.report(str(tmp_path), torch.float32)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (LlamaConfig(**SIZE, **HEADS), "bfloat16, head dim 24\n  4 of 4 layers are paged"),
        (
            GptOssConfig(**SIZE, **HEADS, num_local_experts=2, sliding_window=8),
            "head dim 24, with sinks, window\n  4 of 4 layers are paged, 384 bytes per token and group",
        ),
        (
            BartConfig(d_model=32, encoder_layers=1, decoder_layers=2, decoder_attention_heads=4),
            "2 of 2 layers are paged",
        ),
        (MambaConfig(hidden_size=32, num_hidden_layers=1), "0 of 1 layers are paged"),
    ],
)
def test_models(config: Any, says: str, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    assert says in doctor.report(str(tmp_path))


def test_a_gpu_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is missing for a better kernel is named, with how to get it; what would not be picked anyway is not."""
    device = torch.device("cuda", 0)
    capability = lambda device: (9, 0) if device.type == "cuda" else None  # noqa: E731
    monkeypatch.setattr(choosing, "cuda_capability", capability)
    monkeypatch.setattr(choosing, "failure_of", lambda *args: None)  # nothing can be tried here
    monkeypatch.setattr(doctor, "devices", lambda: {device: "NVIDIA H100, compute capability 9.0, 80 GiB"})
    two = Flash2(lambda: flash_find.functions_of(FlashAttn2(), "flash-attn 2.8.3"), capability)  # type: ignore
    monkeypatch.setitem(BACKENDS, "flash2", two)
    monkeypatch.setitem(BACKENDS, "flash3", Flash3(capability=capability))
    monkeypatch.setitem(BACKENDS, "flash4", Flash4(capability=capability))
    monkeypatch.setitem(BACKENDS, "triton", Missing("the triton kernel cannot be imported: no triton"))
    text = doctor.report()
    assert (
        "cuda:0: NVIDIA H100" in text and "flash2     flash-attn 2.8.3, blocks of 256 tokens; softcap, window" in text
    )
    assert "picked: flash2, block_size=256" in text
    (better,) = [line for line in text.splitlines() if "better would be" in line]
    assert "FlashAttention 3 is not installed (build it from" in better and "vllm-flash-attn3" in better
    monkeypatch.setitem(BACKENDS, "flash2", Missing("FlashAttention 2 is not installed"))
    text = doctor.report()
    assert "picked: reference, block_size=16" in text and text.count("better would be") == 4


@pytest.mark.parametrize("name", ["empty", "missing", "/nonexistent"])
@pytest.mark.parametrize("command", ["doctor", "bench --task batch"])
def test_no_such_model(command: str, name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One line, which names it; a string as its code makes an exit status of 1."""
    (tmp_path / "empty").mkdir()
    path = str(tmp_path / name)
    with pytest.raises(SystemExit) as exit:
        main([*command.split(), "--model", path])
    said = str(exit.value.code)
    assert said.startswith(f"--model {path}: ") and said.count("\n") == 0
    assert said.endswith("Give a local folder with a config.json, or a Hub id") and not capfd.readouterr().out


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    monkeypatch.setitem(BACKENDS, "cpu", Missing("the cpu kernel needs a C++ compiler"))
    text = doctor.report()
    assert "C++ compiler: none. CXX=/nowhere/c++ is not an executable" in text
    assert "picked: reference" in text and "better would be: the cpu kernel needs a C++ compiler" in text
