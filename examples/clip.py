"""CLIP: images and captions in one space; scikit-learn's digits and the names of their numbers, told apart afterwards.

python examples/clip.py
torchrun --nproc-per-node 2 examples/clip.py --config examples/engines/fsdp2.toml
"""

import torch
from options import config, options
from plots import plot
from sklearn.datasets import load_digits
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from transformers import CLIPConfig, CLIPModel

import prepkit as pk

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
END = 127
"""The byte that ends a caption, and whose place CLIP reads the caption from."""

args = options("runs/clip", 150)
torch.manual_seed(0)
data = load_digits()
images = torch.tensor(data.images, dtype=torch.float32)[:, None].expand(-1, 3, -1, -1) / 8 - 1  # (1797, 3, 8, 8)
labels = torch.tensor(data.target)
captions = torch.tensor([[*f"a {name}".encode().ljust(8), END] for name in NAMES])  # (10, 9)
batches = DataLoader(TensorDataset(images[:1400], labels[:1400]), batch_size=64, shuffle=True, drop_last=True)
held_out = DataLoader(TensorDataset(images[1400:], labels[1400:]), batch_size=64)

tower = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
text = tower | {"vocab_size": 128, "max_position_embeddings": 9, "eos_token_id": END, "bos_token_id": 0}
model = CLIPModel(CLIPConfig(text_config=text, vision_config=tower | {"image_size": 8, "patch_size": 2}))

cfg = config(
    args,
    optimizer=pk.optim.AdamW(lr=1e-3),
    entry_points=("get_image_features", "get_text_features"),  # called below, past forward
    loaders=pk.data.EachLoader((pk.data.ShardLoaders(split_batches=True), pk.data.ShardLoaders(purpose="evaluation"))),
    clip=pk.ClipNorm(1.0),
)
ready = pk.apply(pk.build_plan(cfg, model, loaders=[batches, held_out]))
training, evaluation = ready.loaders
ready.log.to(pk.track.JsonLines(f"{args.folder}/log.jsonl"))
captions = captions.to(next(ready.model.parameters()).device)
while ready.steps < args.steps:
    for pixels, digits in ready.ranks.progress(training, desc=f"epoch {ready.epoch}"):
        scores = ready.model(input_ids=captions[digits], pixel_values=pixels).logits_per_image
        fits = (digits[:, None] == digits[None]).float()  # a digit stands in a batch more than once
        loss = functional.cross_entropy(scores, fits / fits.sum(1, keepdim=True))
        loss = (loss + functional.cross_entropy(scores.T, fits / fits.sum(1, keepdim=True))) / 2
        ready.backward(loss)
        ready.step()
        ready.log({"loss": ready.ranks.reduce(loss.detach())})
        if ready.steps >= args.steps:
            break

right = []
with ready.evaluating():
    words = functional.normalize(ready.model.get_text_features(input_ids=captions).pooler_output, dim=-1)
    for pixels, digits in evaluation:
        seen = functional.normalize(ready.model.get_image_features(pixel_values=pixels).pooler_output, dim=-1)
        right.append(ready.ranks.gather_for_metrics((seen @ words.T).argmax(1) == digits))
share = torch.cat(right).float().mean()
ready.ranks.print(
    f"{ready.steps} steps; of {len(torch.cat(right))} held-out digits {share:.0%} are told by their caption"
)
plot(ready, f"{args.folder}/log.jsonl")
ready.close()
