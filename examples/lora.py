"""LoRA: adapters over a frozen Llama, by peft; the adapters alone are saved, and read again.

python examples/lora.py
torchrun --nproc-per-node 2 examples/lora.py --config examples/engines/fsdp2.toml
"""

import torch
from gpt import StandardLibrary
from options import config, options
from peft import LoraConfig, PeftModel, get_peft_model
from plots import plot
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import prepkit as pk

args = options("runs/lora", 60)


def base() -> LlamaForCausalLM:
    """A small model of bytes; a real one comes from ``from_pretrained``."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, tie_word_embeddings=False, **sizes))


targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
model = get_peft_model(base(), LoraConfig(r=8, lora_alpha=32, target_modules=targets, modules_to_save=["lm_head"]))
optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
batches = DataLoader(StandardLibrary(windows=8 * args.steps), batch_size=8)

cfg = config(args, clip=pk.ClipNorm(1.0), loaders=pk.data.ShardLoaders(split_batches=True))
ready = pk.apply(pk.build_plan(cfg, model, optimizer=optimizer, loaders=[batches]))
ready.log.to(pk.track.JsonLines(f"{args.folder}/log.jsonl"))
for tokens in ready.ranks.progress(ready.loaders[0], desc="training"):
    loss = ready.model(input_ids=tokens, labels=tokens).loss
    ready.backward(loss)
    ready.step()
    ready.log({"loss": ready.ranks.reduce(loss.detach())})

ready.export(f"{args.folder}/adapter")
ready.ranks.barrier("the adapter is written")
again = PeftModel.from_pretrained(base(), f"{args.folder}/adapter").eval()
with torch.no_grad():
    loss = again(input_ids=tokens.cpu(), labels=tokens.cpu()).loss
ready.ranks.print(f"{ready.steps} steps; the adapter alone, over the base, gives a loss of {float(loss):.2f}")
plot(ready, f"{args.folder}/log.jsonl")
ready.close()
