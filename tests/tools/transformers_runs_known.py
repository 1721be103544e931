"""Which types of language models do not train equal under DDP and FSDP2 here, and why: what the table rests on."""

ROUNDING = "the model magnifies float32 rounding; both runs are equal to 1e-5 in float64"
DEFAULTS = "the defaults of its config make no model: sizes or ids that a checkpoint brings are not in it"
UPSTREAM = "its config lacks a field that its model reads, in transformers 5.23"
SIZES = "its sizes depend on each other in a way that the tiny config does not keep"
LARGE = "parts that the tiny config does not reach keep their size: more than 6 M parameters"
CHOSEN_BY_NONE = (
    "equal in float32 until an expert is chosen on no rank, which is stepped with zeros under FSDP2 and not at all "
    "under DDP; in float64 its router computes in float32"
)
INPUTS = "it takes other inputs than tokens"

EXCEPTIONS: tuple[tuple[str, str, str, str], ...] = (
    ("equal in float64", "", "", ROUNDING),
    ("failed", "switch_transformers", "replicas-differ", CHOSEN_BY_NONE),
    ("not built", "", "are not tiny", LARGE),
    ("not built", "bailing_hybrid", "The size of tensor a", SIZES),
    ("not built", "blt", "shapes cannot be multiplied", SIZES),
    ("not built", "cohere_compass_text", "'full_attention'", DEFAULTS),
    ("not built", "dbrx", "no attribute 'rope_theta'", UPSTREAM),
    ("not built", "dots1", "empty() takes", DEFAULTS),
    ("not built", "dots3_note", "num_key_value_heads must match", SIZES),
    ("not built", "", "TimmWrapperModel requires the timm library", "needs timm, which is not installed"),
    ("not built", "gemma3n_text", "set of layer types", SIZES),
    ("not built", "gemma4_assistant", "hidden_size_per_layer_input", DEFAULTS),
    ("not built", "musicgen", "Multiple valid text configs", INPUTS),
    ("not built", "musicgen_melody", "Multiple valid text configs", INPUTS),
    ("not built", "mamba2", "Inconsistent configuration", SIZES),
    ("not built", "musicflamingo", "'model_type'", SIZES),
    ("not built", "qwen4_exp_text", "unsupported operand", DEFAULTS),
    ("not built", "qwen4_exp", "unsupported operand", DEFAULTS),
    ("not built", "nemo_speechlm", "audio_hidden_size", SIZES),
    ("not built", "gemma4_unified_assistant", "set of layer types", SIZES),
    ("not built", "git", "Expected input batch_size", "its loss expects image features before the tokens"),
    ("not built", "reformer", "axial_pos_embds", SIZES),
    ("not built", "voxtral_realtime", "input_features", INPUTS),
    ("not built", "zamba", "must be equal to the number of `layer_types`", SIZES),
    ("not built", "zamba2", "must be equal to the number of `layer_types`", SIZES),
)
"""Outcome, type ("" for all), part of the detail, and the reason."""
