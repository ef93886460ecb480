"""Tiny random models of every family under contract; a new family is one line here.

Sizes are odd on purpose (widths differ from vocabularies, heads from layers) so that a
transposed matrix or a swapped axis cannot pass by luck.
"""

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from transformers import PreTrainedModel

BASE: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4,
    "intermediate_size": 40, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GPT: dict[str, Any] = {
    "vocab_size": 61, "n_embd": 24, "n_layer": 3, "n_head": 4, "n_positions": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GQA = {**BASE, "num_key_value_heads": 2}
OPT = {**BASE, "ffn_dim": 40, "word_embed_proj_dim": 24}
SEQ2SEQ: dict[str, Any] = {
    "vocab_size": 61, "d_model": 24, "encoder_layers": 2, "decoder_layers": 3,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 40, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": None,
}  # fmt: skip
IMAGE = {
    "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 40,
    "image_size": 16, "patch_size": 4, "num_labels": 7,
}  # fmt: skip

NEXT_TOKEN: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", GPT),
    "gptj": ("GPTJConfig", "GPTJForCausalLM", {**GPT, "rotary_dim": 4}),
    "gpt_neo": (
        "GPTNeoConfig", "GPTNeoForCausalLM",
        {**BASE, "num_layers": 3, "num_heads": 4, "attention_types": [[["global", "local", "global"], 1]], "window_size": 4},
    ),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", BASE),
    "gpt_neox_sequential": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {**BASE, "use_parallel_residual": False}),
    "opt": ("OPTConfig", "OPTForCausalLM", OPT),
    "opt_350m": ("OPTConfig", "OPTForCausalLM", {**OPT, "word_embed_proj_dim": 16, "do_layer_norm_before": False}),
    "bloom": ("BloomConfig", "BloomForCausalLM", {**GPT, "hidden_size": 24}),
    "llama": ("LlamaConfig", "LlamaForCausalLM", GQA),
    "mistral": ("MistralConfig", "MistralForCausalLM", {**GQA, "sliding_window": 4}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", GQA),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**GQA, "head_dim": 6}),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", {**GQA, "head_dim": 6}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {**GQA, "head_dim": 6, "sliding_window": 4}),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {**GQA, "head_dim": 6, "sliding_window": 4}),
    "phi": ("PhiConfig", "PhiForCausalLM", {**BASE, "num_attention_heads": 3}),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {**GQA, "original_max_position_embeddings": 64}),
    "falcon": ("FalconConfig", "FalconForCausalLM", {**BASE, "ffn_hidden_size": 40}),
    "falcon_new": ("FalconConfig", "FalconForCausalLM", {**BASE, "new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 40}),
    "falcon_alibi": ("FalconConfig", "FalconForCausalLM", {**BASE, "alibi": True, "parallel_attn": False, "ffn_hidden_size": 40}),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", GQA),
    "stablelm": ("StableLmConfig", "StableLmForCausalLM", {**BASE, "num_attention_heads": 3, "num_key_value_heads": 3}),
    "mpt": ("MptConfig", "MptForCausalLM", {"vocab_size": 61, "d_model": 24, "n_layers": 3, "n_heads": 4, "max_seq_len": 64}),
    "cohere": ("CohereConfig", "CohereForCausalLM", GQA),
    "granite": ("GraniteConfig", "GraniteForCausalLM", {**GQA, "residual_multiplier": 0.3, "logits_scaling": 7.0, "embedding_multiplier": 3.0}),
    "gpt_oss": (
        "GptOssConfig", "GptOssForCausalLM",
        {**GQA, "head_dim": 6, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4},
    ),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {**GQA, "num_local_experts": 4}),
    "qwen2_moe": (
        "Qwen2MoeConfig", "Qwen2MoeForCausalLM",
        {**GQA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 20},
    ),
}  # fmt: skip
MASKED_TOKEN: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertConfig", "BertForMaskedLM", BASE),
    "roberta": ("RobertaConfig", "RobertaForMaskedLM", {**BASE, "max_position_embeddings": 66}),
    "distilbert": ("DistilBertConfig", "DistilBertForMaskedLM", {**BASE, "dim": 24, "hidden_dim": 40, "n_layers": 3, "n_heads": 4}),
    "albert": ("AlbertConfig", "AlbertForMaskedLM", {**BASE, "embedding_size": 12}),
    "electra": ("ElectraConfig", "ElectraForMaskedLM", {**BASE, "embedding_size": 12}),
}  # fmt: skip
SEQ_TO_SEQ: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bart": ("BartConfig", "BartForConditionalGeneration", SEQ2SEQ),
    "t5": (
        "T5Config", "T5ForConditionalGeneration",
        {"vocab_size": 61, "d_model": 24, "d_kv": 6, "d_ff": 40, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4, "decoder_start_token_id": 0},
    ),
    "flan_t5": (
        "T5Config", "T5ForConditionalGeneration",
        {"vocab_size": 61, "d_model": 24, "d_kv": 6, "d_ff": 40, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4,
         "decoder_start_token_id": 0, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "whisper": (
        "WhisperConfig", "WhisperForConditionalGeneration",
        {**SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 64},
    ),
}  # fmt: skip
CLASS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "vit": ("ViTConfig", "ViTForImageClassification", IMAGE),
    "deit": ("DeiTConfig", "DeiTForImageClassification", IMAGE),
    "dinov2": ("Dinov2Config", "Dinov2ForImageClassification", {**IMAGE, "mlp_ratio": 2}),
}
ALL = {**NEXT_TOKEN, **MASKED_TOKEN, **SEQ_TO_SEQ, **CLASS}

LABELS = {"num_labels": 4}
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", BASE),
    "roberta": ("Roberta", {**BASE, "max_position_embeddings": 66, "pad_token_id": 1}),
    "distilbert": ("DistilBert", MASKED_TOKEN["distilbert"][2]),
    "electra": ("Electra", {**BASE, "embedding_size": 12}),
    "gpt2": ("GPT2", GPT),
    "llama": ("Llama", GQA),
}
TEXT_CLASS: dict[str, tuple[str, str, dict[str, Any]]] = {
    f"{name}_text": (
        f"{family}Config",
        f"{family}ForSequenceClassification",
        {**settings, **LABELS},
    )
    for name, (family, settings) in ENCODERS.items()
}
TOKEN_CLASS: dict[str, tuple[str, str, dict[str, Any]]] = {
    f"{name}_token": (f"{family}Config", f"{family}ForTokenClassification", {**settings, **LABELS})
    for name, (family, settings) in ENCODERS.items()
}
POOLED_IMAGE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "beit": ("BeitConfig", "BeitForImageClassification", IMAGE),
    "dinov2_patches": ("Dinov2Config", "Dinov2ForImageClassification", {**IMAGE, "mlp_ratio": 2}),
}
CLASSIFIERS = {**TEXT_CLASS, **TOKEN_CLASS, **POOLED_IMAGE}


def build(name: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random model of family `name`, with non-trivial norms and biases."""
    config_name, model_name, settings = {**ALL, **CLASSIFIERS}[name]
    torch.manual_seed(seed)
    make: Callable[..., PreTrainedModel] = getattr(hf, model_name)
    model = make(getattr(hf, config_name)(**{**settings, **changes})).eval()
    with torch.no_grad():
        # At initialisation norms are 1, biases 0 and everything else tiny: many a wrong
        # program then gives the right numbers.
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
        if name == "dinov2":  # its head also takes a mean over patches, which a lens cannot know
            model.classifier.weight[:, model.config.hidden_size :] = 0
    return model
