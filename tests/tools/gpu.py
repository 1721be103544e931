"""What only a GPU can show, in one process and without pytest: ``python -m tests.tools.gpu`` prints one table.

Needs torch with CUDA and prepkit's own dependencies; bitsandbytes where 4-bit layers shall be tried. The tests marked
``gpu`` run the same scenarios. Each raises where something does not hold, and returns a figure to print.
"""

from __future__ import annotations

import importlib.util
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import prepkit as pk

WIDTH, BLOCKS, WORDS = 256, 4, 512


class Skipped(Exception):
    """The scenario needs something that is not here."""


class Block(nn.Module):
    """Residual two-layer block."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        change: Tensor = self.down(torch.nn.functional.gelu(self.up(x)))
        return x + change


class Net(nn.Module):
    """A small language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def tokens() -> Tensor:
    return torch.randint(WORDS, (8, 64), generator=torch.Generator().manual_seed(1)).cuda()


def prepared(model: nn.Module, **how: Any) -> Any:
    """The model with AdamW, prepared on CUDA; observed by apply itself to be as planned."""
    cfg = pk.Config(**{"optimizer": pk.optim.AdamW(lr=1e-3), **how})
    return pk.apply(pk.build_plan(cfg, model))


def trained(ready: Any, steps: int = 8) -> list[float]:
    """Losses of so many steps on one batch; they must fall."""
    batch, losses = tokens(), []
    for _ in range(steps):
        loss = nn.functional.cross_entropy(ready.model(batch).flatten(0, 1), batch.flatten())
        ready.backward(loss)
        assert ready.step(), "the optimizer did not step"
        losses.append(loss.item())
    assert losses[-1] < losses[0], f"the loss did not fall: {losses}"
    return losses


def fell(losses: list[float]) -> str:
    return f"loss {losses[0]:.3f} -> {losses[-1]:.3f}"


# --- scenarios -----------------------------------------------------------------------------------------------------


def placement() -> str:
    """Parameters move and stay the same objects."""
    model = net()
    before = dict(model.named_parameters())
    ready = prepared(model)
    assert all(before[name] is param and param.is_cuda for name, param in ready.model.named_parameters())
    return fell(trained(ready))


def bf16() -> str:
    """Computes in bfloat16, stores and returns float32."""
    ready = prepared(net(), precision=pk.BF16())
    seen: list[torch.dtype] = []
    ready.model.head.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    assert ready.model(tokens()).dtype == torch.float32
    assert seen == [torch.bfloat16]
    return fell(trained(ready))


def fp16() -> str:
    """Trains with a scaled loss; a window that overflows is skipped and halves the scale."""
    ready = prepared(net(), precision=pk.FP16(init_scale=1024.0))
    losses = trained(ready)
    before = ready.model.head.weight.detach().clone()
    ready.backward(ready.model(tokens()).sum() * torch.inf)
    assert not ready.step(), "a step with infinite gradients was made"
    assert ready.skipped
    assert ready.scaler.get_scale() == 512.0
    assert torch.equal(before, ready.model.head.weight)
    return fell(losses)


def ddp() -> str:
    """DDP over NCCL with one rank; bfloat16 compression of gradients, which needs NCCL."""
    hook = pk.ddp.CompressHook(dtype="bfloat16")
    ready = prepared(net(), engine=pk.DDP(hook=hook), precision=pk.BF16())
    assert dist.get_backend() == "nccl"
    assert ready.model.device_ids == [torch.cuda.current_device()]
    return fell(trained(ready))


def sync_batchnorm() -> str:
    """A forward and a backward through SyncBatchNorm."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    ready = prepared(model, engine=pk.DDP(sync_batchnorm=True))
    ready.backward(ready.model(torch.randn(16, 8, device="cuda")).square().mean())
    assert ready.step()
    assert isinstance(ready.unwrap()[1], nn.SyncBatchNorm)
    return "converted"


def fsdp1() -> str:
    """FSDP1 over NCCL with one rank, on the device, through its flat parameters."""
    ready = prepared(net(), engine=pk.FSDP1(), precision=pk.BF16())
    assert dist.get_backend() == "nccl"
    assert all(param.is_cuda for param in ready.model.parameters())
    return fell(trained(ready))


def fsdp2() -> str:
    """FSDP2 over NCCL with one rank."""
    ready = prepared(net(), engine=pk.FSDP2(), precision=pk.BF16())
    assert ready.model(tokens()).dtype == torch.float32
    return fell(trained(ready))


def fsdp2_inference() -> str:
    """A model that is only evaluated is sharded on the device, with its buffers (behaviour G-66)."""
    model = net()
    model.register_buffer("table", torch.arange(3.0))
    ready = prepared(model, engine=pk.FSDP2(), intent=pk.Intent.INFERENCE, optimizer=None)
    where = {tensor.device for tensor in (*ready.model.parameters(), *ready.model.buffers())}
    assert where == {tokens().device}, f"tensors are on {where}"
    return f"all on {where.pop()}"


def fsdp2_fp16() -> str:
    """FSDP2 in float16 with a scaled loss."""
    return fell(trained(prepared(net(), engine=pk.FSDP2(), precision=pk.FP16(init_scale=1024.0))))


def fsdp2_sent() -> str:
    """Values on the device are kept on the host while it shards, come back over NCCL, and compute what they did."""
    model = net().cuda()
    with torch.no_grad():
        expected = model(tokens())
    ready = prepared(model, engine=pk.FSDP2(), weights=pk.BroadcastWeights())
    apart = (ready.model(tokens()) - expected).abs().max().item()
    assert apart < 1e-4, f"outputs before and after are {apart} apart"
    return fell(trained(ready))


def _near_eager(how: Any) -> str:
    expected = net().cuda()(tokens())
    ready = prepared(net(), compile=how)
    apart = (ready.model(tokens()) - expected).abs().max().item()
    assert apart < 1e-3, f"compiled and eager outputs are {apart} apart"
    return fell(trained(ready))


def compile_whole() -> str:
    """Inductor over the whole model."""
    return _near_eager(pk.CompileModel())


def compile_blocks() -> str:
    """Inductor per block."""
    return _near_eager(pk.CompileBlocks())


def four_bit() -> str:
    """A frozen 4-bit layer with an adapter."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise Skipped("bitsandbytes is not installed")
    import bitsandbytes

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = bitsandbytes.nn.Linear4bit(WIDTH, WIDTH, bias=False, compute_dtype=torch.bfloat16)
            self.adapter = nn.Linear(WIDTH, WIDTH, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.base(x) + self.adapter(x)
            return out

    model = Adapted().cuda()  # which packs
    bytes_ = model.base.weight.detach().clone()
    ready = prepared(model, precision=pk.BF16())
    ready.backward(ready.model(torch.randn(8, WIDTH, device="cuda")).square().mean())
    assert ready.step()
    assert torch.equal(bytes_, model.base.weight)
    return f"{model.base.weight.dtype}, {tuple(model.base.weight.shape)}"


def peak() -> str:
    """Apply holds the model at most once beside the shards that it makes of one unit."""
    size = sum(param.numel() * param.element_size() for param in net().parameters())
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    ready = prepared(net(), engine=pk.FSDP2())
    above = torch.cuda.max_memory_allocated() - start
    del ready
    assert above < 1.5 * size, f"apply took {above} bytes for a model of {size}"
    return f"{above / size:.2f} x the model"


SCENARIOS: dict[str, Callable[[], str]] = {
    "placement": placement,
    "bf16 autocast": bf16,
    "fp16 with scaler": fp16,
    "ddp over nccl": ddp,
    "synchronised batch norm": sync_batchnorm,
    "fsdp1 over nccl": fsdp1,
    "fsdp2 over nccl": fsdp2,
    "fsdp2 for inference": fsdp2_inference,
    "fsdp2 in fp16": fsdp2_fp16,
    "fsdp2 with sent weights": fsdp2_sent,
    "compile, whole": compile_whole,
    "compile, per block": compile_blocks,
    "4-bit layers": four_bit,
    "peak memory of apply": peak,
}
"""Everything that needs a GPU, by the name it has in the table."""


def run(name: str) -> str:
    """One scenario, with its process group ended and its compiled code forgotten afterwards."""
    try:
        return SCENARIOS[name]()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        torch._dynamo.reset()


def main() -> int:
    """Prints the table; the number of scenarios that failed."""
    if not torch.cuda.is_available():
        print("skipped: torch sees no CUDA device")
        return 0
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}, {torch.cuda.get_device_name()}")
    failed = 0
    for name in SCENARIOS:
        began = time.perf_counter()
        try:
            outcome = f"ok       {run(name)}"
        except Skipped as why:
            outcome = f"skipped  {why}"
        except Exception as error:
            failed += 1
            outcome = f"FAILED   {type(error).__name__}: {error}"
            traceback.print_exc()
        print(f"{name:24} {time.perf_counter() - began:6.1f} s  {outcome}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
