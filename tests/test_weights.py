"""What cached prefixes depend on beside tokens: weights of every kind, and code of others inside the forward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from enabling import enabled
from tiny import KNOWS_POSITIONS, VOCAB, build, condition, default, make_pool, paged, prompts, shapes_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from transformers import LlamaConfig, LlamaForCausalLM

from hf_paged import weights

GREEDY: dict[str, Any] = dict(max_new_tokens=9)
HITS = 28  # of a prompt of 30 tokens in blocks of 4


def whole(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return dict(input_ids=ids, attention_mask=torch.ones_like(ids))


def one_prompt(rows: int = 1, length: int = 30) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, VOCAB, (1, length), generator=torch.Generator().manual_seed(5))
    return whole(ids.repeat(rows, 1))


def hits_of(model: Any, pool: Any, inputs: dict[str, torch.Tensor]) -> int:
    """Prefix tokens that one call takes over. Its tokens must be those of the default cache."""
    before = pool.stats().prefix_hit_tokens
    want = default(model, inputs, **GREEDY)
    assert torch.equal(want, paged(model, inputs, pool, **GREEDY))
    return int(pool.stats().prefix_hit_tokens - before)


class Scaled(torch.Tensor):
    """A quantized weight as libraries make them: a tensor of its own class that can be multiplied with, and not much more."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=scale.dtype)

    def __init__(self, data: torch.Tensor, scale: torch.Tensor):
        self.quantized, self.scale = data, scale

    @classmethod
    def of(cls, weight: torch.Tensor) -> Any:
        scale = weight.abs().amax(1, keepdim=True) / 127
        return cls((weight / scale).round().to(torch.int8), scale)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls(args[0].quantized, args[0].scale)
        if function not in (torch.ops.aten.t.default, torch.ops.aten.mm.default):
            raise NotImplementedError(f"{function} of a quantized weight")
        return function(*tree_map(lambda x: x.quantized * x.scale if isinstance(x, Scaled) else x, args))


class Flattening(Scaled):
    def __tensor_flatten__(self) -> Any:
        return ["quantized", "scale"], None


def _quantized(kind: type[Scaled], model: Any) -> None:
    projection = model.model.layers[0].self_attn.k_proj
    projection.weight = torch.nn.Parameter(kind.of(projection.weight.detach()), requires_grad=False)


def _buffer(make: Callable[[], torch.Tensor], model: Any) -> None:
    model.register_buffer("beside", make())
    model.register_buffer("beside_too", make())


KINDS: dict[str, tuple[Callable[[Any], None], int]] = {
    "quantized": (functools.partial(_quantized, Flattening), HITS),
    "opaque": (functools.partial(_quantized, Scaled), 0),
    "sparse": (functools.partial(_buffer, lambda: torch.eye(8).to_sparse()), 0),
    "uint4": (functools.partial(_buffer, lambda: torch.zeros(8, 8, dtype=torch.uint8).view(torch.uint4)), HITS),
    "float8": (functools.partial(_buffer, lambda: torch.zeros(8, 8).to(torch.float8_e4m3fn).t()[::2]), HITS),
    "complex": (functools.partial(_buffer, lambda: torch.zeros(8, 8, dtype=torch.complex64).t()), HITS),
    "scalar": (functools.partial(_buffer, lambda: torch.tensor(3.0)), HITS),
    "empty": (functools.partial(_buffer, lambda: torch.empty(0)), HITS),
    "meta": (functools.partial(_buffer, lambda: torch.empty(8, 8, device="meta")), HITS),
}


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_every_kind(kind: str) -> None:
    """Where a weight cannot be read, nothing is kept."""
    model = build("llama")
    change, hits = KINDS[kind]
    change(model)
    pool = make_pool(model)
    assert [hits_of(model, pool, one_prompt()) for _ in range(2)] == [0, hits]


def test_a_quantized_weight_that_changes() -> None:
    model = build("llama")
    _quantized(Flattening, model)
    pool = make_pool(model)
    hits_of(model, pool, one_prompt())
    model.model.layers[0].self_attn.k_proj.weight.scale.data.mul_(-1)
    assert hits_of(model, pool, one_prompt()) == 0


@pytest.mark.skipif(not KNOWS_POSITIONS, reason="nothing tells the device of the ids")
def test_an_offloaded_model() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = build("llama")
    pool = make_pool(model)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert model.device.type == "meta"
    inputs = whole(torch.cat([one_prompt(3, 100)["input_ids"], prompts([5, 5, 5])["input_ids"]], 1))
    assert [hits_of(model, pool, inputs) for _ in range(2)] == [300, 3 * 104]


@pytest.fixture
def mesh() -> Iterator[Any]:
    """Of one process."""
    if not dist.is_available():
        pytest.skip("torch was built without torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def test_distributed_weights(mesh: Any) -> None:
    from torch.distributed.tensor import Replicate, distribute_tensor

    model = build("llama")
    beside = torch.nn.Parameter(distribute_tensor(torch.randn(8, 8), mesh, [Replicate()]), requires_grad=False)
    model.model.layers[0].register_parameter("beside", beside)
    pool = make_pool(model)
    assert [hits_of(model, pool, one_prompt()) for _ in range(2)] == [0, HITS]
    beside.to_local().data.add_(1)
    assert hits_of(model, pool, one_prompt()) == 0


def test_fsdp_runs_as_many_passes_as_without(mesh: Any) -> None:
    """A pass more or less than those of another process would wait for it forever."""
    from torch.distributed.fsdp import fully_shard

    model = build("llama")
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    ids = torch.cat([one_prompt(3, 100)["input_ids"], prompts([5, 5, 5])["input_ids"]], 1)
    pool = make_pool(model)
    with shapes_of(model) as shapes:
        assert [hits_of(model, pool, whole(ids)) for _ in range(2)] == [0, 0]
    assert shapes[: len(shapes) // 4] * 4 == shapes


def _steer(scale: Any, module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output + torch.randn(64, generator=torch.Generator().manual_seed(1)) * scale


def test_a_steered_model_finds_nothing_of_the_plain_one() -> None:
    model, inputs = build("llama", "sdpa"), one_prompt()
    layer = model.model.layers[0]
    with enabled(model) as handle:
        plain = model.generate(**inputs, **GREEDY)
        with layer.register_forward_hook(functools.partial(_steer, 2)):
            steered = [model.generate(**inputs, **GREEDY) for _ in range(2)]
        assert handle.pool.stats().prefix_hit_tokens == 0
        again = model.generate(**inputs, **GREEDY)
        assert handle.pool.stats().prefix_hit_tokens == HITS
    assert torch.equal(plain, default(model, inputs, **GREEDY)) and torch.equal(plain, again)
    with layer.register_forward_hook(functools.partial(_steer, 2)):
        want = default(model, inputs, **GREEDY)
    assert not torch.equal(want, plain)
    assert all(torch.equal(want, got) for got in steered)


def test_equal_prompts_steered_each_in_its_own_way() -> None:
    model = build("llama")
    scales = torch.tensor([0.0, 3.0, 1.0])[:, None, None]
    with model.model.layers[0].register_forward_hook(functools.partial(_steer, scales)):
        want = default(model, one_prompt(3), **GREEDY)
        assert torch.equal(want, paged(model, one_prompt(3), make_pool(model), **GREEDY))
    assert len(set(map(tuple, want.tolist()))) == 3


@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("where", ["root", "layer"])
def test_a_hook_sees_what_it_would_see_with_the_default_cache(where: str, kind: str) -> None:
    """Equal rows, a long beginning shared by rows, pads, and a prompt that is known already."""
    model, seen = build(kind), []
    module = model if where == "root" else model.model.layers[1]
    capture = dict(root=lambda output: output.logits, layer=lambda output: output)[where]
    shared = torch.cat([one_prompt(3, 600)["input_ids"], prompts([5, 5, 5])["input_ids"]], 1)
    pool = make_pool(model, 1000)
    with module.register_forward_hook(lambda module, args, output: seen.append(capture(output))):
        for inputs in (one_prompt(2), whole(shared), prompts([9, 4, 7]), one_prompt(2)):
            del seen[:]
            default(model, inputs, max_new_tokens=3)
            want = list(seen)
            del seen[:]
            paged(model, inputs, pool, max_new_tokens=3)
            assert [x.shape for x in seen] == [x.shape for x in want]
            real = inputs["attention_mask"].bool()[:, -want[0].shape[1] :]
            torch.testing.assert_close(seen[0][real], want[0][real], rtol=1e-3, atol=1e-3)


def test_hooks_of_transformers_keep_nothing_from_being_shared() -> None:
    model = build("llama")
    pool = make_pool(model)
    paged(model, one_prompt(), pool, output_hidden_states=True, return_dict_in_generate=True, max_new_tokens=2)
    assert [hits_of(model, pool, one_prompt()) for _ in range(2)] == [0, HITS]
    assert hits_of(model, pool, one_prompt(3)) == HITS  # three rows are one


class Adapters(torch.nn.Module):
    """A linear layer with an adapter for each row, as those of PEFT: `names` come from a hook for every call."""

    def __init__(self, base: torch.nn.Module):
        super().__init__()
        self.base = base

    def forward(self, x: torch.Tensor, names: tuple[float, ...] = ()) -> Any:
        if len(names) not in (0, len(x)):
            raise ValueError(f"{len(names)} names for {len(x)} rows")
        return self.base(x) * (torch.tensor(names)[:, None, None] if names else 1)


def _with_names(target: Any, args: Any, kwargs: dict[str, Any], names: tuple[float, ...]) -> Any:
    return args, {**kwargs, "names": names}


@pytest.mark.parametrize("num_beams", [1, 2])
@pytest.mark.parametrize("lengths", [(30, 30), (30, 9)])
def test_adapters_that_differ_from_row_to_row(lengths: tuple[int, int], num_beams: int) -> None:
    model, flags = build("llama"), dict(max_new_tokens=9, num_beams=num_beams)
    attention = model.model.layers[0].self_attn
    attention.k_proj = adapted = Adapters(attention.k_proj)
    inputs = one_prompt(2)
    inputs["attention_mask"][1, : 30 - lengths[1]] = 0
    pool = make_pool(model)
    paged(model, inputs, pool, **flags)
    results = []
    for names in ((1.5, 0.5), (0.5, -1.0), (1.5, 0.5)):
        names = tuple(name for name in names for _ in range(num_beams))
        with adapted.register_forward_pre_hook(functools.partial(_with_names, names=names), with_kwargs=True):
            want = default(model, inputs, **flags)
            assert torch.equal(want, paged(model, inputs, pool, **flags))
        results.append(want)
    assert not torch.equal(results[0], results[1])
    assert pool.stats().prefix_hit_tokens == 0


def test_inputs_prepared_by_others(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As PEFT's prompt tuning puts embeddings of its own in front."""
    prepare, embed, soft = llama.prepare_inputs_for_generation, llama.get_input_embeddings(), torch.ones(1, 1, 64)

    def with_soft_prompt(ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        inputs = prepare(ids, *args, **kwargs)
        inputs["inputs_embeds"] = embed(inputs.pop("input_ids")) + soft
        return inputs

    pool = make_pool(llama)
    plain = default(llama, one_prompt(), **GREEDY)
    with monkeypatch.context() as patch:
        patch.setattr(llama, "prepare_inputs_for_generation", with_soft_prompt)
        assert [hits_of(llama, pool, one_prompt(rows)) for rows in (1, 2)] == [0, 0]
        assert not torch.equal(plain, default(llama, one_prompt(), **GREEDY))
    assert hits_of(llama, pool, one_prompt()) == 0


def test_a_replaced_forward_finds_nothing_of_the_own_one() -> None:
    model = build("llama")
    mlp, pool = model.model.layers[0].mlp, make_pool(model)
    forward = mlp.forward
    assert hits_of(model, pool, one_prompt()) == 0
    for scale in (0, -1):  # the second one is likely to get the address of the first
        mlp.forward = functools.partial(lambda scale, x: forward(x) * scale, scale)
        assert [hits_of(model, pool, one_prompt()) for _ in range(2)] == [0, HITS]
        del mlp.forward
    assert hits_of(model, pool, one_prompt()) == HITS


def _head(model: Any) -> None:
    model.model.layers[0].self_attn.o_proj.weight.data[:, 16:32] = 0


def _rows(model: Any) -> None:
    model.model.layers[0].self_attn.k_proj.weight.data[16:] *= -1


def _transposed(model: Any) -> None:
    model.model.layers[0].self_attn.q_proj.weight.data[:, 8:16] *= -3


@pytest.mark.parametrize("change", [_head, _rows, _transposed], ids=lambda change: change.__name__)
def test_parts_changed_through_data(change: Callable[[Any], None]) -> None:
    model = build("llama")
    projection = model.model.layers[0].self_attn.q_proj
    projection.weight = torch.nn.Parameter(projection.weight.detach().t().contiguous().t())
    pool = make_pool(model)
    plain = default(model, one_prompt(), **GREEDY)
    assert hits_of(model, pool, one_prompt()) == 0
    change(model)
    assert hits_of(model, pool, one_prompt()) == 0
    assert not torch.equal(plain, default(model, one_prompt(), **GREEDY))


@pytest.mark.parametrize("shape", [(64, 64), (576, 576), (1536, 576), (192, 576), (4096, 64), (64, 4096), (1000, 24)])
def test_samples_spread_over_rows_and_columns(shape: tuple[int, int]) -> None:
    """Any sixth of the rows or columns side by side holds one."""
    weight = torch.zeros(shape)
    weights._sample(weight).fill_(1)
    assert 16 <= weight.sum() <= 33
    for axis, length in enumerate(shape):
        found = weight.sum(1 - axis).nonzero()[:, 0].tolist()
        gaps = [after - before for before, after in zip([-1, *found], [*found, length])]
        assert max(gaps) <= -(-length // 6)


def test_samples_copy_nothing_else() -> None:
    class Largest(TorchDispatchMode):
        copied = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = function(*args, **(kwargs or {}))
            if out.data_ptr() != args[0].data_ptr() if isinstance(args[0], torch.Tensor) else True:
                self.copied = max(self.copied, out.numel())
            return out

    weight = torch.arange(4096.0).view(64, 64)
    for strided in (weight, weight.t(), weight[:, ::2], weight[:1].expand(64, 64)):
        with Largest() as largest:
            sample = weights._sample(strided)
        assert torch.equal(sample, strided.flatten()[:: weights.sample_step(strided)])
        assert largest.copied <= 33


def _all_but_samples(weight: torch.Tensor) -> torch.Tensor:
    changed = -weight.detach().flatten()
    step = weights.sample_step(weight)
    changed[::step] *= -1
    return changed.view(weight.shape)


def _in_place(weight: torch.nn.Parameter) -> None:
    with torch.no_grad():
        weight.copy_(_all_but_samples(weight))


def _exchanged(weight: torch.nn.Parameter) -> None:
    version = weight._version
    weight.data = _all_but_samples(weight)
    assert weight._version == version


@pytest.mark.parametrize("change", [_in_place, _exchanged], ids=lambda change: change.__name__)
def test_changes_that_no_sample_shows(change: Callable[[torch.nn.Parameter], None]) -> None:
    """The version tells of those in place, the address of others."""
    model = build("llama")
    weight = model.model.layers[0].self_attn.k_proj.weight
    pool, sample, plain = make_pool(model), weights._sample(weight).clone(), default(model, one_prompt(), **GREEDY)
    assert hits_of(model, pool, one_prompt()) == 0
    change(weight)
    assert torch.equal(weights._sample(weight), sample)
    assert hits_of(model, pool, one_prompt()) == 0
    assert not torch.equal(plain, default(model, one_prompt(), **GREEDY))


def test_autocast_finds_nothing_of_full_precision() -> None:
    """Contents, since tokens mostly agree: the first logits after a hit are computed from the cached keys."""
    model = build("llama")
    flags = dict(max_new_tokens=1, return_dict_in_generate=True, output_logits=True)
    pool = make_pool(model)
    full = paged(model, one_prompt(), pool, **flags).logits[0]
    with torch.autocast("cpu", torch.bfloat16):
        want = default(model, one_prompt(), **flags).logits[0]
        fresh = paged(model, one_prompt(), make_pool(model), **flags).logits[0]
        got = paged(model, one_prompt(), pool, **flags).logits[0]
    assert pool.stats().prefix_hit_tokens == 0
    assert torch.equal(fresh, got)
    assert (got - want).abs().max() < (full - want).abs().max()


LONG = dict(long_factor=[3.0] * 8, short_factor=[1.0] * 8, original_max_position_embeddings=24)


ROPES = [dict(rope_type="dynamic", factor=4.0), dict(rope_type="longrope", factor=4.0, **LONG)]


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["rope_type"])
def test_keys_that_depend_on_how_long_the_sequence_was(rope: dict[str, Any]) -> None:
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, head_dim=16, vocab_size=VOCAB,
        pad_token_id=0, max_position_embeddings=24, rope_parameters=dict(rope_theta=10000.0, **rope),
    )  # fmt: skip
    model = condition(LlamaForCausalLM(config), 2)
    model.set_attn_implementation("paged")
    pool, ids = make_pool(model), one_prompt(1, 60)["input_ids"]
    rotary = model.model.rotary_emb
    frequencies = rotary.inv_freq.clone()
    for length in (20, 60, 30):
        results = []
        for run in (default, functools.partial(paged, pool=pool)):
            # Lets go of those of a longer sequence, which releases up to 5.10 do not do by themselves.
            rotary.register_buffer("inv_freq", frequencies.clone(), persistent=False)
            rotary.max_seq_len_cached = 24
            results.append(run(model, whole(ids[:, :length]), **GREEDY))
        assert torch.equal(*results)
    assert pool.stats().prefix_hit_tokens == 0
