"""Small data and models of our own in the place of what public training scripts would download."""

from __future__ import annotations

import csv
import random
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

WORDS = (
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "the",
    "a",
    "one",
    "dog",
    "cat",
    "bird",
    "sees",
    "likes",
    "it",
    "and",
)
PICTURES = 160


def sentences(count: int) -> list[str]:
    """So many of them, of three to eight words, the same in each run."""
    draw = random.Random(3)
    return [" ".join(draw.choices(WORDS[5:], k=draw.randint(3, 8))) for _ in range(count)]


def pairs(count: int) -> dict[str, list[Any]]:
    """Columns as the glue tasks have them."""
    first, second = sentences(count), sentences(count)[::-1]
    return {"sentence1": first, "sentence2": second, "label": [at % 2 for at in range(count)], "idx": [*range(count)]}


def load_dataset(name: str, *which: Any, split: str | None = None, **others: Any) -> Any:
    """Texts, pairs of texts, or pictures, by the name that a script asks for."""
    import datasets

    if any(others.get(given) for given in ("data_files", "data_dir")):
        return datasets.load.load_dataset(name, *which, split=split, **others)
    del others
    if name == "imagefolder" or any(word in name for word in ("pokemon", "flowers", "naruto", "pix2pix", "fill50k")):
        made = pictures(PICTURES)
        parts = {"train": made.select_columns(["image", "text"]) if "naruto" in name else made}
    elif "glue" in name or "mrpc" in which:
        parts = {part: datasets.Dataset.from_dict(pairs(128)) for part in ("train", "validation", "test")}
    elif name == "financial_phrasebank":
        texts = {"sentence": sentences(32), "label": [at % 3 for at in range(32)]}
        features = datasets.Features(
            {
                "sentence": datasets.Value("string"),
                "label": datasets.ClassLabel(names=["negative", "neutral", "positive"]),
            }
        )
        parts = {"train": datasets.Dataset.from_dict(texts, features=features)}
    else:
        counts = {"train": 512, "validation": 32}
        parts = {part: datasets.Dataset.from_dict({"text": sentences(count)}) for part, count in counts.items()}
    return parts[split] if split in parts else datasets.DatasetDict(parts)


def pictures(count: int) -> Any:
    """Pictures with a text, and with other pictures for scripts that edit them."""
    import datasets
    from PIL import Image

    draw = random.Random(4)

    def picture() -> Any:
        return Image.new("RGB", (32, 32), tuple(draw.randrange(256) for _ in range(3)))

    columns = {"image": [picture() for _ in range(count)], "text": sentences(count)}
    columns |= {"input_image": columns["image"], "edited_image": [picture() for _ in range(count)]}
    columns |= {"edit_prompt": columns["text"], "conditioning_image": columns["edited_image"]}
    picture_columns = [name for name in columns if name.endswith("image")]
    made = datasets.Dataset.from_dict(columns | {"label": [at % 2 for at in range(count)]})
    made = made.cast_column("label", datasets.ClassLabel(names=["light", "dark"]))
    for name in picture_columns:
        made = made.cast_column(name, datasets.Image())
    return made


def picture_folder(folder: Path) -> str:
    """A folder of pictures whose names say their label, as pets do, with four of each."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    for at in range(PICTURES):
        Image.new("RGB", (32, 32), (at, 200 - at, at % 9 * 20)).save(folder / f"{'abcd'[at % 4]}_{at}.jpg")
    return str(folder)


def text_files(folder: Path) -> str:
    """A CSV of texts."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "texts.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["text"], *([one] for one in sentences(64))])
    return str(folder / "texts.csv")


def tokenizer(*_: Any, **__: Any) -> Any:
    """Words to numbers."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]", eos_token="[SEP]", bos_token="[CLS]", model_max_length=32,
    )  # fmt: skip


def config(*_: Any, **others: Any) -> Any:
    """Of the smallest transformer."""
    from transformers import BertConfig

    said = {name: value for name, value in others.items() if name in ("num_labels",)}
    return BertConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=64, is_decoder=False, **said,
    )  # fmt: skip


def classifier(*_: Any, **others: Any) -> Any:
    """Texts to labels."""
    from transformers import BertForSequenceClassification

    return BertForSequenceClassification(config(**others))


def causal(*_: Any, **__: Any) -> Any:
    """Texts to their next words."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
            max_position_embeddings=128, pad_token_id=0,
        )
    )  # fmt: skip


def seq2seq(*_: Any, **__: Any) -> Any:
    """Texts to texts."""
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=len(WORDS), d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0
        )
    )


class Metric:
    """Agreement of predictions and references, each of which is told to ``heard``."""

    def __init__(self, heard: Callable[[float], None]) -> None:
        self.heard, self.pairs = heard, []  # type: ignore[var-annotated]

    def add_batch(self, *, predictions: Any, references: Any) -> None:
        said = (one.tolist() if hasattr(one, "tolist") else list(one) for one in (predictions, references))
        self.pairs += list(zip(*said, strict=True))

    add = add_batch

    def compute(self, predictions: Any = None, references: Any = None, **_: Any) -> dict[str, float]:
        if predictions is not None:
            self.add_batch(predictions=predictions, references=references)
        said = self.pairs
        self.pairs = []
        value = sum(one == other for one, other in said) / max(1, len(said))
        self.heard(float(len(said)))
        self.heard(value)
        names = ("precision", "recall", "f1", "accuracy")
        return dict.fromkeys((*names, *(f"overall_{name}" for name in names), "score", "exact_match"), value)


def unless_folder(read: Any, made_here: Callable[..., Any]) -> Callable[..., Any]:
    """Reads a folder that is there; makes what would be downloaded."""
    return lambda name="", *given, **named: (read if Path(str(name)).is_dir() else made_here)(name, *given, **named)


def library(name: str) -> Any:
    """The library itself where it is installed, since others look into it; else an empty one."""
    if name not in sys.modules and find_spec(name):
        return import_module(name)
    made = sys.modules.setdefault(name, ModuleType(name))
    made.__spec__ = made.__spec__ or ModuleSpec(name, None)  # others ask for it
    return made


def stand_in(heard: Callable[[float], None]) -> None:
    """Put all of it where scripts look for it."""
    import datasets
    import transformers

    datasets.load_dataset = load_dataset
    library("evaluate").load = lambda *_, **__: Metric(heard)
    for kind, made_here in (
        (transformers.AutoTokenizer, tokenizer),
        (transformers.AutoConfig, config),
        (transformers.AutoModelForSequenceClassification, classifier),
        (transformers.AutoModelForCausalLM, causal),
        (transformers.AutoModelForSeq2SeqLM, seq2seq),
    ):
        kind.from_pretrained = unless_folder(kind.from_pretrained, made_here)
    nltk = library("nltk")
    nltk.data, nltk.sent_tokenize = SimpleNamespace(find=lambda _: ""), lambda text: text.split(". ")
    library("timm").create_model = create_model


def create_model(*_: Any, num_classes: int = 4, **__: Any) -> Any:
    """Pictures to labels, with the parts that scripts of timm ask for."""
    model: Any = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3, stride=4), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(2), torch.nn.Flatten(),
        torch.nn.Linear(16, num_classes),
    )  # fmt: skip
    model.get_classifier = lambda: model[-1]
    model.default_cfg = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5), "input_size": (3, 32, 32)}
    return model
