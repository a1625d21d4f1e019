"""Tiny random models of every sequence-to-sequence type of transformers 5.24, text and speech, for architecture tests.

`build(model_type)` makes one with a small config, `make_inputs(model, seed)` a batch of two sources of which the first is
padded at its end. `EXCEPTIONS` names the types that cannot take part, and why. Types that have no encoder of their own to
attend to (speech encoders whose outputs stand in the prompt of a causal model) are run on text alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import transformers
from architectures import PAD, PADS, REMOVE, ROWS, SMALL, VOCAB, WIDTH, WINDOW, known, tiny_kwargs
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
)

TEXT, SPEECH = dict(MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES), dict(MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES)
NAMES = {**SPEECH, **TEXT}
BOTH = sorted(
    name for name in TEXT if SPEECH.get(name, TEXT[name]) != TEXT[name]
)  # two classes: the second as "... speech"
TYPES = sorted([*NAMES, *(f"{name} speech" for name in BOTH)])

FLAT: dict[str, Any] = dict(
    SMALL,
    encoder_ffn_dim=96, decoder_ffn_dim=96, num_layers=2, num_decoder_layers=4, num_encoder_layers=2,
    num_encoder_attention_heads=4, num_decoder_attention_heads=4,
    encoder_num_hidden_layers=2, decoder_num_hidden_layers=4, encoder_num_attention_heads=4, decoder_num_attention_heads=4,
    encoder_num_key_value_heads=4, decoder_num_key_value_heads=2,
    max_encoder_position_embeddings=256, max_decoder_position_embeddings=256, max_source_positions=256,
    max_target_positions=256, max_text_positions=256, max_speech_positions=256,
    dropout=0.0, dropout_rate=0.0, activation_dropout=0.0, hidden_dropout=0.0, positional_dropout=0.0,
    encoder_layerdrop=0.0, decoder_layerdrop=0.0, speech_encoder_layerdrop=0.0, adaptor_dropout=0.0,
    decoder_start_token_id=2, decoder_vocab_size=VOCAB, src_vocab_size=VOCAB, tgt_vocab_size=VOCAB, num_mel_bins=8,
    attention_window=8, local_radius=7, block_size=4, num_random_blocks=1, num_global_tokens=4,
    expert_capacity=64, num_sparse_encoder_layers=1, num_sparse_decoder_layers=2,
    encoder_sparse_step=2, decoder_sparse_step=2, composer_vocab_size=4, forced_eos_token_id=None,
    speech_encoder_layers=2, speech_encoder_attention_heads=4, speech_encoder_intermediate_size=96,
    feature_projection_input_dim=16, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, conv_depthwise_kernel_size=3,
    t2u_vocab_size=40, t2u_encoder_layers=1, t2u_decoder_layers=1, t2u_encoder_ffn_dim=32, t2u_decoder_ffn_dim=32,
    t2u_encoder_attention_heads=2, t2u_decoder_attention_heads=2, unit_hifi_gan_vocab_size=40, unit_embed_dim=16,
    conv_channels=16, input_feat_per_channel=8, conv_dim=[16] * 3, conv_kernel=[4, 3, 3], conv_stride=[2, 2, 2],
    adaptor_kernel_size=4, adaptor_stride=4, mask_time_prob=0.0, mask_feature_prob=0.0,
)  # fmt: skip
FLAT.pop("head_dim")
PART: dict[str, Any] = dict(
    hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=4, vocab_size=VOCAB, pad_token_id=PAD,
    bos_token_id=1, eos_token_id=None, max_position_embeddings=256,
)  # fmt: skip
BERT: dict[str, Any] = dict(model_type="bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **PART)
PARAKEET: dict[str, Any] = dict(
    model_type="parakeet_encoder", hidden_size=64, intermediate_size=96, num_attention_heads=4, num_hidden_layers=2,
    num_mel_bins=8, subsampling_factor=2, subsampling_conv_channels=8,
    dropout=0.0, activation_dropout=0.0, attention_dropout=0.0,
)  # fmt: skip
WAV2VEC2: dict[str, Any] = dict(
    model_type="wav2vec2", hidden_size=64, intermediate_size=96, num_attention_heads=4, num_hidden_layers=2,
    conv_dim=[16] * 3, conv_kernel=[4, 3, 3], conv_stride=[2, 2, 2], num_conv_pos_embeddings=16,
    num_conv_pos_embedding_groups=4, layerdrop=0.0, hidden_dropout=0.0, activation_dropout=0.0, attention_dropout=0.0,
    mask_time_prob=0.0, feat_proj_dropout=0.0,
)  # fmt: skip
SLIDING_FULL = ["sliding_attention", "full_attention"] * 2
GEMMA: dict[str, Any] = dict(
    PART, num_key_value_heads=2, head_dim=16, sliding_window=WINDOW, num_hidden_layers=4, layer_types=SLIDING_FULL,
    tie_word_embeddings=False,  # tied to a head without training, a token only ever repeats itself
)  # fmt: skip
SIGLIP: dict[str, Any] = dict(
    model_type="siglip_vision_model", hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    image_size=32, patch_size=16, vision_use_head=False,
)  # fmt: skip
TOKENS: dict[str, Any] = dict(pad_token_id=PAD, bos_token_id=1, eos_token_id=None, decoder_start_token_id=2)

FEW: dict[str, Any] = dict(num_hidden_layers=REMOVE, encoder_layers=2)  # deeper random encoders tell the decoder little
# Per type: keyword arguments on top of what the config knows of FLAT, or a function that returns all of them.
EXTRA: dict[str, dict[str, Any] | Callable[[], dict[str, Any]]] = {
    "canary": lambda: dict(
        encoder_config=PARAKEET,
        decoder_config=dict(PART, num_hidden_layers=4, is_encoder_decoder=True),
        vocab_size=VOCAB,
        **TOKENS,
    ),
    "cohere_asr": lambda: dict(
        PART, encoder_config=PARAKEET, num_hidden_layers=4, head_dim=16, decoder_start_token_id=2
    ),
    "encoder-decoder": lambda: dict(
        encoder=dict(BERT, num_hidden_layers=2),
        decoder=dict(BERT, num_hidden_layers=4, is_decoder=True, add_cross_attention=True),
        **TOKENS,
    ),
    "fun_asr_nano": dict(adaptor_config=dict(intermediate_size=16)),
    "bart": FEW,
    "blenderbot-small": FEW,
    "fsmt": FEW,
    "mvp": FEW,
    "speecht5": FEW,
    "marian": dict(FEW, share_encoder_decoder_embeddings=True),
    "moonshine_streaming": lambda: dict(
        PART,
        encoder_config=dict(
            PART, vocab_size=REMOVE, num_hidden_layers=2, head_dim=16, sliding_windows=[[8, 2], [8, 0]], frame_ms=0.5
        ),
        num_hidden_layers=4,
        head_dim=16,
        decoder_start_token_id=2,
    ),
    "prophetnet": dict(
        num_hidden_layers=REMOVE, num_encoder_layers=4
    ),  # the default cache has as many layers as the encoder
    "nemo_speechlm": dict(
        audio_config=dict(diarization_config=dict(head_config=dict(audio_hidden_size=64))),
        word_timestamp_config=dict(blank_token_id=VOCAB - 1),
        audio_token_id=VOCAB - 1,
    ),
    "vibevoice_asr": dict(
        acoustic_tokenizer_encoder_config=dict(num_filters=4, depths=[1] * 7),
        semantic_tokenizer_encoder_config=dict(num_filters=4, depths=[1] * 7),
    ),
    "pegasus_x": dict(stagger_local_blocks=False),
    "speech-encoder-decoder": lambda: dict(
        encoder=WAV2VEC2,
        decoder=dict(BERT, num_hidden_layers=4, is_decoder=True, add_cross_attention=True),
        **TOKENS,
    ),
    "t5gemma": lambda: dict(
        encoder=dict(GEMMA), decoder=dict(GEMMA), vocab_size=VOCAB, tie_word_embeddings=False, **TOKENS
    ),
    "t5gemma2": lambda: dict(
        encoder=dict(
            text_config=dict(GEMMA),
            vision_config=SIGLIP,
            image_token_index=155,
            boi_token_index=156,
            eoi_token_index=157,
        ),
        decoder=dict(GEMMA),
        tie_word_embeddings=False,
        image_token_index=155,
        eoi_token_index=157,
        **TOKENS,
    ),
    "whisper": dict(max_source_positions=24, max_target_positions=128),
}

# Run under their own attention implementation. The first two have eager attention only: under sdpa, and so under "paged",
# the default cache gives other tokens as well. Of the third, the audio encoder has, and cannot be set back from "paged".
OWN_ATTENTION = {"bigbird_pegasus", "nllb-moe", "vibevoice_asr"}
# Types that cannot take part, with the reason.
EXCEPTIONS: dict[str, str] = dict(
    dia="one row per codebook, not token prompts; its own generate refuses beams",
    kyutai_speech_to_text="its prompt is made of audio codes, which its own generate computes window by window",
    vibevoice="generates speech by diffusion between its tokens, not token by token",
    voxtral_realtime="asks for audio at every position, and for another encoder cache",
)


def names(model_type: str) -> tuple[str, str]:
    """Config type and model class."""
    name = model_type.removesuffix(" speech")
    return name, SPEECH[name] if model_type != name else NAMES[name]


def tiny_config(model_type: str) -> Any:
    config_class = CONFIG_MAPPING[model_type]
    extra = EXTRA.get(model_type, {})
    if callable(extra):
        return config_class(**without_removed(extra()))
    base = config_class()
    parts = {name: getattr(base, name) for name in config_class.sub_configs if hasattr(base, name)}
    if parts:
        small = {name: dict(tiny(part), model_type=part.model_type) for name, part in parts.items()}
        return config_class(**without_removed(merged(small, extra)))
    kwargs = {name: value for name, value in FLAT.items() if known(base, name)[0]}
    return config_class(**without_removed({**kwargs, **extra}))


def tiny(part: Any) -> dict[str, Any]:
    """The entries of FLAT that a part of a composite config takes, its own parts included."""
    lists = {name for name, value in FLAT.items() if isinstance(value, list)}
    entries = {
        name: value
        for name, value in tiny_kwargs(part, FLAT).items()
        if name not in lists or isinstance(getattr(part, name), (list, tuple))
    }
    for name in type(part).sub_configs:
        if getattr(part, name, None) is not None:
            entries[name] = dict(tiny(getattr(part, name)), model_type=getattr(part, name).model_type)
    return entries


def merged(small: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    return {**small, **{k: merged(small.get(k, {}), v) if isinstance(v, dict) else v for k, v in extra.items()}}


def without_removed(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {
        name: without_removed(value) if isinstance(value, dict) else value
        for name, value in kwargs.items()
        if value is not REMOVE
    }


def build(model_type: str) -> Any:
    """A model with random weights, in float32."""
    config_type, class_name = names(model_type)
    config = tiny_config(config_type)
    model_class = getattr(transformers, class_name)
    try:
        with torch.device("meta"):
            size = sum(p.numel() for p in model_class._from_config(copy.deepcopy(config)).parameters())
    except Exception:  # a few models compute with real values in __init__
        size = 0
    assert size < 20e6, f"{size / 1e6:.0f}M parameters: the config is not tiny"
    torch.manual_seed(0)
    model = model_class._from_config(config).eval().float()
    start = 2 if model.config.is_encoder_decoder else None
    model.generation_config = transformers.GenerationConfig(
        pad_token_id=PAD, bos_token_id=1, eos_token_id=None, decoder_start_token_id=start
    )
    if model_type == "pop2piano":
        model.generation_config.composer_to_feature_token = {f"composer{i}": 2 + i for i in range(1, 5)}
    return model


def make_inputs(model: Any, model_type: str, seed: int) -> dict[str, torch.Tensor]:
    """Two sources, the first of them with PADS pads at its end; for a causal model, at its start."""
    generator = torch.Generator().manual_seed(seed)
    frames = SPEECH_INPUTS.get(model_type)
    if frames:
        name, shape = frames
        return {name: torch.randn(ROWS, *shape, generator=generator)}
    ids = torch.randint(3, VOCAB - 10, (ROWS, WIDTH), generator=generator)
    mask = torch.ones_like(ids)
    pads = slice(WIDTH - PADS, None) if model.config.is_encoder_decoder else slice(PADS)
    ids[0, pads], mask[0, pads] = PAD, 0
    return dict(input_ids=ids, attention_mask=mask)


# The input of speech encoders: its name, and its shape without the batch.
SPEECH_INPUTS: dict[str, tuple[str, tuple[int, ...]]] = {
    "canary": ("input_features", (48, 8)),
    "cohere_asr": ("input_features", (48, 8)),
    "moonshine": ("input_values", (9000,)),
    "pop2piano": ("input_features", (WIDTH, 64)),
    "moonshine_streaming": ("input_values", (480,)),
    "seamless_m4t speech": ("input_features", (64, 16)),
    "seamless_m4t_v2 speech": ("input_features", (64, 16)),
    "speech-encoder-decoder": ("input_values", (400,)),
    "speech_to_text": ("input_features", (64, 8)),
    "speecht5": ("input_values", (400,)),
    "whisper": ("input_features", (8, 48)),
}
__all__ = ["EXCEPTIONS", "TYPES", "build", "make_inputs", "tiny_kwargs"]
