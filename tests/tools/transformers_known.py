"""Why a type of transformers does not build here, and which refusals of types are right: what the table rests on."""

NO_MODEL = "the type has a config and no model of its own"
LIBRARY = "needs a library that is not installed"
DEFAULTS = "the defaults of its config make no model: sizes or ids that a checkpoint brings are not in it"
UPSTREAM = "its config lacks a field that its model reads, in transformers 5.23"

NOT_BUILT: tuple[tuple[str, str], ...] = (
    ("has no model of its own", NO_MODEL),
    ("No module named 'transformers.models.", NO_MODEL),
    ("library but it was not found", LIBRARY),
    ("No module named 'torchaudio'", LIBRARY),
    ("'DbrxAttentionConfig' object has no attribute 'rope_theta'", UPSTREAM),
    ("'Qwen3OmniMoeTalkerTextConfig' object has no attribute 'shared_expert_intermediate_size'", UPSTREAM),
    ("'T5Gemma2TextConfig' object has no attribute 'dropout_rate'", NO_MODEL),
    ("'T5Gemma2DecoderConfig' object has no attribute 'dropout_rate'", NO_MODEL),
    ("dots1: TypeError: empty() takes 1 positional argument", DEFAULTS),
    ("cohere_compass: KeyError: 'full_attention'", DEFAULTS),
    ("cohere_compass_text: KeyError: 'full_attention'", DEFAULTS),
    ("diffusion_gemma: TypeError: empty()", DEFAULTS),
    ("diffusion_gemma_text: TypeError: empty()", DEFAULTS),
    ("gemma4_assistant: StrictDataclassClassValidationError", DEFAULTS),
    ("gemma4_unified_assistant: ValueError: The set of layer types", DEFAULTS),
    ("granite4_vision: TypeError: object of type 'NoneType' has no len()", DEFAULTS),
    ("pp_ocrv5_server_det: TypeError: 'NoneType' object is not subscriptable", DEFAULTS),
    ("pp_ocrv6_medium_det: TypeError: 'NoneType' object is not subscriptable", DEFAULTS),
    ("vitmatte: TypeError: can only concatenate list", DEFAULTS),
)
"""Part of ``type: error`` to the reason."""

_STYLE = "its own plan asks for a style of experts, packed or latent projections that torch's styles do not serve"
_TIE = "its own plan splits the output embedding, and leaves the input embedding, which is the same parameter, whole"
_ODD = "sizes of its default config do not divide by two ranks"

REFUSED: dict[tuple[str, str], str] = {
    ("tensor.style-unknown", ""): _STYLE,
    ("tensor.tie-broken", ""): _TIE,
    ("tensor.not-divisible", "colpali"): "its attention has one key-value head, which two ranks cannot share",
    ("tensor.not-divisible", "paligemma"): "its attention has one key-value head, which two ranks cannot share",
    ("tensor.not-divisible", "hunyuan_v1_dense"): _ODD,
    ("tensor.not-divisible", "hunyuan_v1_moe"): _ODD,
    ("tensor.not-divisible", "kyutai_speech_to_text"): _ODD,
    ("tensor.not-divisible", "step3p5"): _ODD,
    ("tensor.not-divisible", "step3p7"): _ODD,
    ("tensor.not-a-layer", "qwen3_omni_moe_talker_code_predictor"): "its own plan names a list of layers as a layer",
    ("model.nothing-trainable", "flava_image_codebook"): "its class freezes every parameter",
    ("units.empty", "dinov3_vit"): "its default config has a trained parameter for no register token",
    ("units.empty", "lw_detr"): "its default config has no feature level, and layers without elements",
}
"""Rule and type ("" for all) to why the refusal is right."""
