"""Compiles the Triton kernels for GPUs that need not be there, and prints what each program takes of a multiprocessor.

    python tests/triton_resources.py [--quick]

One JSON object a line. `stack` (bytes per thread) is above 0 where registers were spilled. `products` are the types in which
frame ids are multiplied by the strides of the pools.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hf_paged.kernels import triton as backend
from hf_paged.kernels import triton_ops

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
FRAMES = 16 * 1024 + 16  # a stride that nothing else in the program has


def build(
    function: Any,
    capability: int,
    pointers: dict[str, str],
    integers: list[str],
    constants: dict[str, Any],
    **options: Any,
) -> Any:
    """A kernel for a device of this capability; arguments that are in none of the groups are float32 numbers."""
    signature, attributes = {}, {}
    for index, name in enumerate(function.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in pointers:
            signature[name] = pointers[name]
        else:
            signature[name] = "i32" if name in integers else "fp32"
        if name in pointers or name.startswith("q_"):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def attend(
    capability: int, dtype: torch.dtype, key_dim: int, value_dim: int, tile: backend.Tile, split: bool, features: bool
) -> dict[str, Any]:
    kind = "*" + NAMES[dtype]
    pointers = dict.fromkeys(("q", "k_pool", "v_pool", "out"), kind)
    pointers |= dict.fromkeys(("block_table", "seq_lens", "cu_seqlens_q"), "*i32")
    constants: dict[str, Any] = dict(
        K_FRAME=FRAMES * key_dim,
        K_SLOT=8 * key_dim,
        K_HEAD=key_dim,
        V_FRAME=FRAMES * value_dim,
        V_SLOT=8 * value_dim,
        V_HEAD=value_dim,
        GROUP=4,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK_SIZE=16,
        TILE_M=tile.pairs,
        TILE_N=tile.keys,
        DIM_K=backend.power_of_2(key_dim),
        DIM_V=backend.power_of_2(value_dim),
        HAS_SOFTCAP=features,
        HAS_WINDOW=features,
        SPLIT=split,
        PRECISION="ieee",
    )
    if split:
        pointers |= {"out": "*fp32", "stats": "*fp32"}
        constants["sinks"] = None
    else:
        constants["stats"] = None
        pointers |= {"sinks": "*fp32"} if features else {}
        constants |= {} if features else {"sinks": None}
    integers = ["num_tokens", "num_rows", "table_stride", "q_token_stride", "q_head_stride", "window"]
    kernel = build(
        triton_ops.attend,
        capability,
        pointers,
        integers,
        constants,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=True,
    )
    strides = {f"{FRAMES * dim}" for dim in (key_dim, value_dim)}
    types = re.findall(r"arith\.constant (?:dense<)?(\d+)>? : (?:tensor<[\dx]*x)?(i\d+)", kernel.asm["ttir"])
    return {
        "sm": capability,
        "dtype": NAMES[dtype],
        "dims": [key_dim, value_dim],
        "tile": list(tile),
        "split": split,
        "features": features,
        "products": sorted({kind for number, kind in types if number in strides}),
        **usage(kernel),
    }


def usage(kernel: Any) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(TOOLS / "cuobjdump"), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return {
        "registers": found["REG"],
        "stack": found["STACK"] + found["LOCAL"],
        "shared": kernel.metadata.shared,
    }


def combinations(quick: bool) -> Iterator[tuple[Any, ...]]:
    """Every tile of the table, alone and with the features that take registers; `quick`: one program."""
    if quick:
        yield 80, torch.bfloat16, 64, 64, backend.TILES[2, 64][0], False, False
        return
    for capability in (80, 90):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for dim in (64, 128, 256):
                for tile in backend.TILES[dtype.itemsize, dim]:
                    for split in (False, True):
                        for features in (False, True)[
                            : 1 if dtype == torch.float16 else 2
                        ]:  # it takes what bfloat16 takes
                            yield capability, dtype, dim, dim, tile, split, features


if __name__ == "__main__":
    for combination in combinations("--quick" in sys.argv):
        print(json.dumps(attend(*combination)), flush=True)
