"""QLoRA: adapters over a base that bitsandbytes holds in four bits; the adapters alone are saved, and read again.

python examples/qlora.py
torchrun --nproc-per-node 2 examples/qlora.py --config examples/engines/fsdp2.toml
"""

from pathlib import Path

import torch
from gpt import StandardLibrary
from options import config, options
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from plots import plot
from torch.utils.data import DataLoader
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

import prepkit as pk

args = options("runs/qlora", 60)
folder = f"{args.folder}/base"
four_bits = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_compute_dtype=torch.bfloat16,
    bnb_4bit_quant_storage=torch.bfloat16,  # the dtype of the units: so FSDP2 shards the packed weights as well
)

with pk.processes.main_process_first():
    if not Path(folder).exists():  # a small model of bytes, as somebody else has saved it
        torch.manual_seed(0)
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        LlamaForCausalLM(LlamaConfig(vocab_size=256, tie_word_embeddings=False, **sizes)).save_pretrained(folder)


def base() -> LlamaForCausalLM:
    """The frozen base, packed."""
    return LlamaForCausalLM.from_pretrained(folder, quantization_config=four_bits, dtype=torch.bfloat16)


torch.manual_seed(0)
targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
frozen = prepare_model_for_kbit_training(base(), use_gradient_checkpointing=False)
frozen.config.use_cache = False  # blocks are recomputed
model = get_peft_model(frozen, LoraConfig(r=8, lora_alpha=32, target_modules=targets, modules_to_save=["lm_head"]))
optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
batches = DataLoader(StandardLibrary(windows=8 * args.steps), batch_size=8)

loaders = pk.data.ShardLoaders(split_batches=True)
cfg = config(args, precision=pk.BF16(), checkpointing=pk.CheckpointBlocks(), clip=pk.ClipNorm(1.0), loaders=loaders)
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
with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
    loss = again(input_ids=tokens.cpu(), labels=tokens.cpu()).loss
ready.ranks.print(f"{ready.steps} steps; the adapter alone, over the base, gives a loss of {float(loss):.2f}")
plot(ready, f"{args.folder}/log.jsonl")
ready.close()
