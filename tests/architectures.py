"""Tiny random models of (nearly) every causal and several encoder-decoder types of transformers 5.24, for architecture tests.

`build(model_type, encoder_decoder)` makes one with a small config; `condition(model, initial, seed, gain)` rescales its weights so that
logits are not degenerate; `make_inputs` draws a left-padded ragged batch. `SKIP` names the types that can't be built, and why.
Take it into the project's tests as far as it serves, and keep it up there.
"""

import copy

import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
)

VOCAB, PAD, ROWS, WIDTH, PADS, WINDOW = 160, 0, 2, 21, 5, 16
ENCODER_DECODER = ["t5", "bart", "whisper", "marian", "pegasus", "mbart", "m2m_100"]

# ---------------------------------------------------------------------------------------------------------------
# tiny configs
# ---------------------------------------------------------------------------------------------------------------

SMALL = dict(
    hidden_size=64, d_model=64, n_embd=64, dim=64, n_embed=64, embedding_size=64,
    intermediate_size=96, ffn_dim=96, ffn_hidden_size=96, n_inner=96, decoder_ffn_dim=96, encoder_ffn_dim=96,
    moe_intermediate_size=32, shared_expert_intermediate_size=32,
    num_hidden_layers=4, n_layer=4, n_layers=4, num_layers=4, decoder_layers=4, encoder_layers=2,
    num_attention_heads=4, n_head=4, n_heads=4, num_heads=4, decoder_attention_heads=4, encoder_attention_heads=4,
    num_key_value_heads=2, num_kv_heads=2, head_dim=16, d_kv=16, d_ff=96,
    vocab_size=VOCAB, max_position_embeddings=256, n_positions=256, n_ctx=256,
    num_experts=4, num_local_experts=4, n_routed_experts=4, num_experts_per_tok=2, moe_topk=2, moe_num_experts=4,
    sliding_window=WINDOW,
    q_lora_rank=24, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16,
    n_group=1, topk_group=1, rotary_dim=8,
    mamba_d_state=8, mamba_n_heads=8, mamba_d_head=16, mamba_n_groups=1, mamba_chunk_size=8, chunk_size=8, state_size=8,
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
    num_global_key_value_heads=2, global_head_dim=16, vocab_size_per_layer_input=VOCAB, hidden_size_per_layer_input=8,
    pad_token_id=PAD, bos_token_id=1, eos_token_id=None, dropout=0.0, attention_dropout=0.0,
    index_n_heads=2, index_head_dim=16, index_topk=8, tie_word_embeddings=False,
)  # fmt: skip
MAY_BE_NONE = ("head_dim", "pad_token_id", "eos_token_id", "bos_token_id")

# Per type: keyword arguments on top of SMALL (REMOVE drops one). A function returns the whole config.
REMOVE = object()
SLIDING_FULL = ["sliding_attention", "full_attention"] * 2
LINEAR_FULL = ["linear_attention", "full_attention"] * 2
NO_HEAD_DIM = dict(head_dim=REMOVE)
HEAD_DIM = dict(head_dim=16)
MAMBA2 = dict(mamba_n_heads=8, mamba_d_head=16, mamba_expand=2)
TWO_ROPES = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": {"rope_type": "default", "rope_theta": 1e6}}  # fmt: skip


def nested(model_type, text=None, **parts):
    """A composite config: a tiny text part plus the given sub-config dicts."""
    config_class = CONFIG_MAPPING[model_type]
    text_class = config_class.sub_configs["text_config"]
    text_kwargs = tiny_kwargs(text_class())
    text_kwargs.update(text or {})
    text_kwargs = {name: value for name, value in text_kwargs.items() if value is not REMOVE}
    return config_class(text_config=text_class(**text_kwargs).to_dict(), **parts)


def blt():
    part = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, intermediate_size=96, vocab_size=VOCAB)  # fmt: skip
    return CONFIG_MAPPING["blt"](
        vocab_size=VOCAB, encoder_hash_byte_group_size=[2, 3], encoder_hash_byte_group_vocab=64, cross_attn_k=1,
        local_attention_window_len=WINDOW, patcher_config=dict(part, sliding_window=WINDOW),
        encoder_config=dict(part, cross_attn_k=1, hidden_size_global=64),
        decoder_config=dict(part, cross_attn_k=1, hidden_size_global=64),
        global_config=dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, intermediate_size=96),
        pad_token_id=PAD, bos_token_id=1, eos_token_id=None, num_hidden_layers=2,
    )  # fmt: skip


def phi4_multimodal():
    base = CONFIG_MAPPING["phi4_multimodal"]()
    vision = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, crop_size=28, image_size=28, feature_layer=-1, image_token_id=155)  # fmt: skip
    audio = dict(hidden_size=32, intermediate_size=32, num_blocks=2, num_attention_heads=2, nemo_conv_channels=16, audio_token_id=156)  # fmt: skip
    return CONFIG_MAPPING["phi4_multimodal"](**tiny_kwargs(base), vision_config=vision, audio_config=audio)


DOTS3_NOTE = dict(
    layer_types=["indexed_attention", "sliding_attention"] * 2,
    num_key_value_heads=4,
    head_dim=24,
    shared_experts_intermediate_size=32,
    swa_num_attention_heads=2,
    swa_num_key_value_heads=2,
    swa_q_lora_rank=24,
    swa_kv_lora_rank=16,
    swa_head_dim=24,
    swa_qk_nope_head_dim=16,
    swa_v_head_dim=16,
)
QWEN4_EXP = dict(indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=8, indexer_compress_ratio=2, hc_lowrank=8)  # fmt: skip
SMALL_VISION = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=32)

EXTRA = dict(
    bamba=dict(MAMBA2, attn_layer_indices=[1, 3]),
    blt=blt,
    cohere_compass_text=dict(layer_types=SLIDING_FULL, rope_parameters=TWO_ROPES),
    dbrx=dict(
        attn_config=dict(kv_n_heads=2, rope_theta=1e4, clip_qkv=8.0),
        ffn_config=dict(ffn_hidden_size=32, moe_num_experts=4, moe_top_k=2),
    ),
    deepseek_v2=dict(num_experts_per_tok=2),
    deepseek_v4=dict(
        layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"] * 2,
        num_hidden_layers=6,
        compress_rates={"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        index_topk=4,
        head_dim=32,
        partial_rotary_factor=0.25,
        o_groups=2,
        o_lora_rank=16,
    ),  # fmt: skip
    doge=dict(keep_window_size=8),
    dory=dict(
        num_hidden_layers=6,
        n_input_layers=2,
        n_output_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 3,
    ),  # fmt: skip
    dots1=dict(
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        layer_types=["full_attention", "sliding_attention"] * 2,
    ),  # fmt: skip
    dots3_note=DOTS3_NOTE,
    dots3_note_text=DOTS3_NOTE,
    falcon=dict(new_decoder_architecture=True),
    falcon_h1=dict(MAMBA2, mamba_d_ssm=128),
    gemma3n_text=dict(
        layer_types=SLIDING_FULL,
        num_kv_shared_layers=2,
        activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0],
        altup_num_inputs=2,
        laurel_rank=8,
    ),  # fmt: skip
    gemma4_text=dict(layer_types=SLIDING_FULL, num_kv_shared_layers=2, head_dim=16, global_head_dim=32),
    gemma4_unified_text=dict(
        layer_types=SLIDING_FULL, head_dim=16, global_head_dim=32, use_bidirectional_attention=None
    ),  # fmt: skip
    git=dict(vision_config=SMALL_VISION),
    gpt_neo=dict(attention_types=[[["global", "local"], 2]], window_size=WINDOW),
    granitemoehybrid=dict(MAMBA2, layer_types=LINEAR_FULL, shared_intermediate_size=32),
    hunyuan_v1_dense=HEAD_DIM,
    hunyuan_v1_moe=HEAD_DIM,
    inkling2_text=dict(
        unpadded_vocab_size=VOCAB,
        sliding_window_size=WINDOW,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        swa_head_dim=16,
        layer_types=["hybrid", "hybrid_sliding"] * 2,
        d_rel=8,
        rel_extent=32,
    ),  # fmt: skip
    inkling2_loop_text=dict(
        unpadded_vocab_size=VOCAB,
        sliding_window_size=WINDOW,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        swa_head_dim=16,
        layer_types=["hybrid", "hybrid_sliding"] * 2,
        d_rel=8,
        rel_extent=32,
    ),  # fmt: skip
    jamba=dict(attn_layer_period=2, attn_layer_offset=1, mamba_dt_rank=4),
    kimi_linear=dict(linear_head_dim=16, linear_num_heads=4),
    lfm2_moe=dict(layer_types=["conv", "full_attention"] * 2, num_dense_layers=1),
    llama4=dict(attention_chunk_size=8),
    llama4_text=dict(attention_chunk_size=8),
    longcat_flash=dict(head_dim=8, expert_ffn_hidden_size=32, zero_expert_num=2),
    mamba2=dict(num_heads=8, head_dim=16, expand=2, n_groups=1),
    minimax_m3_vl_text=dict(
        layer_types=["full_attention", "minimax_m3_sparse"] * 2, index_block_size=4, index_topk_blocks=3
    ),  # fmt: skip
    ministral=HEAD_DIM,
    **{"modernbert-decoder": dict(local_attention=WINDOW)},
    nemotron=dict(head_dim=16, num_key_value_heads=2),
    phi4_multimodal=phi4_multimodal,
    prophetnet=dict(
        num_hidden_layers=REMOVE,
        num_encoder_layers=4,
        num_decoder_layers=4,
        num_encoder_attention_heads=4,
        num_decoder_attention_heads=4,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
    ),  # fmt: skip
    qwen4_exp=QWEN4_EXP,
    qwen4_exp_text=QWEN4_EXP,
    xlm=dict(causal=True, mask_token_id=155),
    xmod=dict(default_language="en_XX", is_decoder=True),
    zamba2=dict(
        head_dim=REMOVE,
        layers_block_type=["mamba", "hybrid"] * 2,
        n_mamba_heads=8,
        num_key_value_heads=4,
        adapter_rank=8,
    ),  # fmt: skip
    zaya=dict(
        num_experts_per_tok=1,
        sliding_window=WINDOW,
        layer_types=["hybrid", "hybrid_sliding"] * 2,
        router_hidden_size=16,
    ),
)

# Types that cannot take part, with the reason.
SKIP = dict(
    gemma3n="the vision tower needs timm; the text model is gemma3n_text",
    gemma4_assistant="drafts from the keys of another model, cannot generate alone",
    gemma4_unified_assistant="drafts from the keys of another model, cannot generate alone",
    musicgen="one row per codebook, not token prompts",
    musicgen_melody="one row per codebook, not token prompts",
    **{"openai-gpt": "takes no cache"},
    minimax="brings its own cache class and refuses every other one",
    reformer="brings its own bucket cache",
    rwkv="keeps its own state, takes no Cache",
    xlstm="keeps its own state, takes no Cache",
    xlnet="keeps its own memories, takes no Cache",
)


def known(config, name):
    """hasattr that also sees attributes which only exist per layer."""
    try:
        return hasattr(config, name), getattr(config, name, None)
    except Exception:  # AmbiguousGlobalPerLayerAttributeError
        return True, "per layer"


def settable(config_class, name):
    attribute = getattr(config_class, name, None)
    return not (isinstance(attribute, property) and attribute.fset is None)


def tiny_kwargs(config, small=SMALL):
    """The entries of `small` that this config knows, with layer types cut to at least four layers of every kind."""
    config_class = type(config)
    kwargs = {}
    for name, value in small.items():
        exists, current = known(config, name)
        if exists and settable(config_class, name) and (current is not None or name in MAY_BE_NONE):
            kwargs[name] = value
    if known(config, "head_dim")[1] is None or known(config, "qk_rope_head_dim")[1] is not None:
        kwargs.pop("head_dim", None)  # derived by the config itself
    if known(config, "kv_lora_rank")[1] and "num_key_value_heads" in kwargs:
        kwargs["num_key_value_heads"] = 4  # multi-head latent attention has as many key heads as query heads
    layer_types = getattr(config, "layer_types", None)
    if layer_types and settable(config_class, "layer_types") and "layer_types" not in config_class.attribute_map:
        kinds = list(dict.fromkeys(layer_types))
        layers = max(4, len(kinds))
        kwargs["layer_types"] = [kinds[i % len(kinds)] for i in range(layers)]
        for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
            if name in kwargs:
                kwargs[name] = layers
    return kwargs


def tiny_config(model_type):
    extra = EXTRA.get(model_type, {})
    if callable(extra):
        return extra()
    base = CONFIG_MAPPING[model_type]()
    text = base.get_text_config(decoder=True)
    kwargs = tiny_kwargs(text)
    if getattr(text, "is_decoder", None) is False and not getattr(text, "is_encoder_decoder", False):
        kwargs["is_decoder"] = True  # BERT and its relatives are bidirectional otherwise
    kwargs.update(extra)
    return type(text)(**{name: value for name, value in kwargs.items() if value is not REMOVE})


def encoder_decoder_config(model_type):
    if model_type == "t5":
        kwargs = dict(d_model=64, d_kv=16, d_ff=96, num_layers=4, num_decoder_layers=4, num_heads=4, vocab_size=VOCAB, dropout_rate=0.0)  # fmt: skip
    else:
        kwargs = dict(
            d_model=64, encoder_layers=2, decoder_layers=4, encoder_attention_heads=4, decoder_attention_heads=4,
            encoder_ffn_dim=96, decoder_ffn_dim=96, vocab_size=VOCAB, max_position_embeddings=256, dropout=0.0,
            attention_dropout=0.0, activation_dropout=0.0, encoder_layerdrop=0.0, decoder_layerdrop=0.0,
        )  # fmt: skip
    if model_type == "whisper":
        kwargs.update(num_mel_bins=8, max_source_positions=24, max_target_positions=128)
        kwargs.pop("max_position_embeddings")
    if model_type == "marian":
        kwargs.update(decoder_vocab_size=VOCAB, share_encoder_decoder_embeddings=True)
    kwargs.update(pad_token_id=PAD, bos_token_id=1, eos_token_id=None, decoder_start_token_id=2, tie_word_embeddings=False)  # fmt: skip
    return CONFIG_MAPPING[model_type](**kwargs)


# ---------------------------------------------------------------------------------------------------------------
# models and inputs
# ---------------------------------------------------------------------------------------------------------------


class Unbuildable(Exception):
    pass


def model_class(model_type, encoder_decoder):
    if not encoder_decoder:
        return getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
    names = {**MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES, **MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES}
    return getattr(transformers, names[model_type])


def build(model_type, encoder_decoder):
    config = encoder_decoder_config(model_type) if encoder_decoder else tiny_config(model_type)
    build_class = model_class(model_type, encoder_decoder)
    try:
        # the class that AutoModelForCausalLM picks for this config: a composite config maps to its text model
        auto = transformers.AutoModelForCausalLM._model_mapping
        if not encoder_decoder and type(config) in auto.keys():
            build_class = auto[type(config)]
    except Exception:
        pass
    try:
        with torch.device("meta"):
            size = sum(p.numel() for p in build_class._from_config(copy.deepcopy(config)).parameters())
    except Exception:  # a few models compute with real values in __init__
        size = 0
    if size > 20e6:
        raise Unbuildable(f"{size / 1e6:.0f}M parameters: the config is not tiny")
    torch.manual_seed(0)
    model = build_class._from_config(config).eval().float()
    model.generation_config = transformers.GenerationConfig(
        pad_token_id=PAD, bos_token_id=1, eos_token_id=None, decoder_start_token_id=2 if encoder_decoder else None
    )
    return model


def make_inputs(model, encoder_decoder, seed):
    generator = torch.Generator().manual_seed(seed)
    model_type = model.config.model_type
    if encoder_decoder and model_type == "whisper":
        return dict(input_features=torch.randn(ROWS, 8, 48, generator=generator))
    ids = torch.randint(3, VOCAB - 10, (ROWS, WIDTH), generator=generator)
    mask = torch.ones_like(ids)
    if model_type != "xlm":  # which takes all pads for right padding, and zeroes its last tokens for them
        ids[0, :PADS], mask[0, :PADS] = PAD, 0
    inputs = dict(input_ids=ids, attention_mask=mask)
    if model_type == "git":  # without an image, it widens the masks of its decode steps by an image all the same
        inputs["pixel_values"] = torch.randn(ROWS, 3, 32, 32, generator=generator)
    return inputs


def condition(model, initial, seed, gain):
    """Random weights under which attention matters: matrices of standard deviation gain/sqrt(fan in)."""
    generator = torch.Generator().manual_seed(seed)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial[name])
            noise = torch.randn(parameter.shape, generator=generator)
            if not parameter.is_floating_point() or "A_log" in name or "conv1d" in name or "dt_" in name:
                continue
            if id(parameter) in embeddings:
                parameter.copy_(noise * 0.5)
            elif parameter.dim() >= 2:
                parameter.copy_(noise * gain / parameter.shape[-1] ** 0.5)
            elif name.endswith("bias"):
                parameter.add_(noise * 0.1)
            else:
                parameter.mul_(1 + 0.1 * noise)
    return model


class jittered:
    """All weights disturbed by a relative 3e-6, some tens of float32 roundings, and put back afterwards."""

    def __init__(self, model, seed):
        self.model, self.seed = model, seed

    def __enter__(self):
        generator = torch.Generator().manual_seed(self.seed)
        self.saved = [p.detach().clone() for p in self.model.parameters()]
        with torch.no_grad():
            for p in self.model.parameters():
                if p.is_floating_point():
                    p.mul_(1 + 3e-6 * torch.randn(p.shape, generator=generator))

    def __exit__(self, *exc):
        with torch.no_grad():
            for p, saved in zip(self.model.parameters(), self.saved):
                p.copy_(saved)
