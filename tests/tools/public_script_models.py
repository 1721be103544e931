"""Folders of tiny models and data that public scripts are given by path: nothing is downloaded, each is made here."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.tools.public_script_stands import pairs, pictures, sentences, tokenizer

TEXT = 24
"""Hidden size of text encoders."""
DOWN, UP = ("DownBlock2D", "CrossAttnDownBlock2D"), ("CrossAttnUpBlock2D", "UpBlock2D")


def blocks(count: int) -> dict[str, Any]:
    """So many blocks of an autoencoder; all but the last halve the width."""
    return {
        "block_out_channels": (8,) * count,
        "down_block_types": ["DownEncoderBlock2D"] * count,
        "up_block_types": ["UpDecoderBlock2D"] * count,
    }


def clip_tokenizer() -> Any:
    """Letters to numbers, as CLIP's tokenizer writes them."""
    from transformers import CLIPTokenizer

    letters = [chr(at) for at in range(33, 127)]
    words = [*letters, *(f"{one}</w>" for one in letters), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={word: at for at, word in enumerate(words)}, merges=[], model_max_length=24)


def clip_text(kind: Any, vocabulary: int) -> Any:
    """A text encoder of CLIP, of the class that is given."""
    from transformers import CLIPTextConfig

    return kind(
        CLIPTextConfig(
            vocab_size=vocabulary, hidden_size=TEXT, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            projection_dim=TEXT, max_position_embeddings=24, eos_token_id=vocabulary - 1, bos_token_id=vocabulary - 2,
        )
    )  # fmt: skip


def autoencoder() -> Any:
    """Pictures to latents of an eighth of their width, as scripts take for granted, and back."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(norm_num_groups=4, latent_channels=4, sample_size=32, **blocks(4))


def unet(**others: Any) -> Any:
    """Noise of latents, told a text."""
    from diffusers import UNet2DConditionModel

    said: dict[str, Any] = {"cross_attention_dim": TEXT, "sample_size": 4} | others
    return UNet2DConditionModel(
        block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, attention_head_dim=4,
        down_block_types=DOWN, up_block_types=UP, **said,
    )  # fmt: skip


def stable_diffusion(folder: Path, channels: int = 4) -> None:
    """Stable Diffusion, in parts as its folder has them, for latents of so many channels with what is beside them."""
    from diffusers import DDPMScheduler, StableDiffusionPipeline
    from transformers import CLIPTextModel

    words = clip_tokenizer()
    StableDiffusionPipeline(
        vae=autoencoder(), text_encoder=clip_text(CLIPTextModel, len(words)), tokenizer=words,
        unet=unet(in_channels=channels), scheduler=DDPMScheduler(num_train_timesteps=100), safety_checker=None,
        feature_extractor=None, requires_safety_checker=False,
    ).save_pretrained(folder)  # fmt: skip


def stable_diffusion_xl(folder: Path) -> None:
    """Likewise with two text encoders, and the size of the picture in the time embedding."""
    from diffusers import DDPMScheduler, StableDiffusionXLPipeline
    from transformers import CLIPTextModel, CLIPTextModelWithProjection

    words = clip_tokenizer()
    times: dict[str, Any] = {"addition_embed_type": "text_time", "addition_time_embed_dim": 8}
    StableDiffusionXLPipeline(
        vae=autoencoder(), tokenizer=words, tokenizer_2=words, text_encoder=clip_text(CLIPTextModel, len(words)),
        text_encoder_2=clip_text(CLIPTextModelWithProjection, len(words)),
        unet=unet(cross_attention_dim=2 * TEXT, projection_class_embeddings_input_dim=TEXT + 6 * 8, **times),
        scheduler=DDPMScheduler(num_train_timesteps=100),
    ).save_pretrained(folder)  # fmt: skip


def picture_guide(folder: Path) -> None:
    """A control net for the model of noise above: pictures come in at the width of latents."""
    from diffusers import ControlNetModel

    ControlNetModel.from_unet(unet(), conditioning_embedding_out_channels=(8, 8, 16, 16)).save_pretrained(folder)


def picture_adapter(folder: Path) -> None:
    """An adapter for the model of noise of the XL kind."""
    from diffusers import T2IAdapter

    T2IAdapter(
        channels=[8, 16, 16, 16], num_res_blocks=1, downscale_factor=16, adapter_type="full_adapter_xl"
    ).save_pretrained(folder)


def pixel_unet(folder: Path) -> None:
    """The config of a small model of noise in pixels."""
    from diffusers import UNet2DModel

    UNet2DModel(
        sample_size=16, block_out_channels=(8, 8), norm_num_groups=4, layers_per_block=1,
        down_block_types=("DownBlock2D",) * 2, up_block_types=("UpBlock2D",) * 2,
    ).save_config(folder)  # fmt: skip


def latent_autoencoder(folder: Path) -> None:
    """The autoencoder alone."""
    autoencoder().save_pretrained(folder)


def quantised_autoencoder(folder: Path) -> None:
    """The config of a small VQ model."""
    from diffusers import VQModel

    VQModel(norm_num_groups=4, num_vq_embeddings=16, **blocks(2)).save_config(folder)


_SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def transformer(kind: str, **sizes: Any) -> Callable[[Path], None]:
    """A folder of a transformer without a head, with its tokenizer; scripts put their own head on it."""

    def made(folder: Path) -> None:
        import transformers

        words = tokenizer()
        config = getattr(transformers, f"{kind}Config")(vocab_size=len(words), **sizes)
        head = {"GPT2": "LMHeadModel", "T5": "ForConditionalGeneration", "Bert": "ForMaskedLM"}[kind]
        getattr(transformers, f"{kind}{head}")(config).save_pretrained(folder)
        words.save_pretrained(folder)

    return made


def picture_transformer(folder: Path) -> None:
    """A vision transformer and what prepares its pictures."""
    from transformers import ViTConfig, ViTForMaskedImageModeling, ViTImageProcessor

    config = ViTConfig(image_size=32, patch_size=8, encoder_stride=8, **_SMALL)
    ViTForMaskedImageModeling(config).save_pretrained(folder)
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)


def text_data(folder: Path) -> None:
    """A file of each kind that scripts of texts ask for, for training and (``*_test``) for evaluation."""
    for part, count in (("", 45), ("_test", 19)):
        columns = pairs(count)
        texts, others = columns["sentence1"], columns["sentence2"]
        both = list(zip(texts, others, strict=True))
        rows: dict[str, list[Any]] = {
            "pairs": [{"sentence1": a, "sentence2": b, "label": at % 2} for at, (a, b) in enumerate(both)],
            "texts": [{"text": one} for one in sentences(6 * count)],
            "tags": [{"tokens": one.split(), "ner_tags": [f"T{len(w) % 3}" for w in one.split()]} for one in texts],
            "summaries": [{"text": one, "summary": other} for one, other in both],
            "translations": [{"translation": {"en": one, "ro": other}} for one, other in both],
            "choices": [
                {"sent1": one, "sent2": "it", "label": at % 4} | {f"ending{n}": others[at - n] for n in range(4)}
                for at, one in enumerate(texts)
            ],
        }
        for name, said in rows.items():
            (folder / f"{name}{part}.json").write_text("\n".join(map(json.dumps, said)))
        asked = [
            {
                "id": str(at), "context": one, "question": f"{one.split()[1]} it",
                "answers": {"text": [one.split()[1]], "answer_start": [one.index(" ") + 1]},
            }
            for at, one in enumerate(texts)
        ]  # fmt: skip
        (folder / f"questions{part}.json").write_text(json.dumps({"data": asked}))


def picture_data(folder: Path) -> None:
    """Pictures in a folder for each label; and those of one subject."""
    for at, one in enumerate(pictures(22)["image"]):
        for place in (folder / "labelled" / "ab"[at % 2], folder / "subject"):
            place.mkdir(parents=True, exist_ok=True)
            if place.name != "subject" or at < 5:
                one.save(place / f"{at}.png")


FOLDERS: dict[str, Callable[[Path], None]] = {
    "sd": stable_diffusion,
    "sdxl": stable_diffusion_xl,
    "sd_inpaint": partial(stable_diffusion, channels=9),
    "controlnet": picture_guide,
    "adapter": picture_adapter,
    "unet": pixel_unet,
    "vae": latent_autoencoder,
    "vq": quantised_autoencoder,
    "bert": transformer("Bert", max_position_embeddings=64, **_SMALL),
    "gpt2": transformer("GPT2", n_positions=64, n_embd=16, n_layer=2, n_head=2),
    "t5": transformer("T5", d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0),
    "vit": picture_transformer,
    "data": text_data,
    "images": picture_data,
}
"""What ``{name}`` stands for in the arguments of a script."""


def folder_of(name: str, root: Path) -> Path:
    """The folder of that name, made where it is not there yet."""
    folder = root / name
    if not folder.is_dir():
        folder.mkdir(parents=True)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            FOLDERS[name](folder)
    return folder
