"""Every check of accelerate's scripts that prepares something, or talks to other ranks."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch

from tests.compat.scripts.check import Check, Deviation


def _accelerator(module: Any) -> tuple[Any, ...]:
    return (module.Accelerator(),)


def _state(module: Any) -> tuple[Any, ...]:
    return (module.PartialState(),)


def _loader(module: Any, **how: Any) -> tuple[Any, ...]:
    loader = torch.utils.data.DataLoader(module.DummyDataset(), num_workers=module.NUM_WORKERS, **how)
    return loader, module.create_accelerator()


def _batch_sampler(module: Any) -> Any:
    dataset = module.DummyDataset()
    return module.BatchSampler(module.RandomSampler(dataset), batch_size=module.BATCH_SIZE, drop_last=False)


def _datasets(_: Any) -> tuple[Any, ...]:
    from datasets import Dataset

    return (Dataset,)


def _any_loader(module: Any) -> None:
    module.DataLoaderDispatcher = object


def _one_folder(module: Any) -> None:
    """All ranks of a check run in one folder, which goes when the check is over."""
    module.tempfile = SimpleNamespace(TemporaryDirectory=lambda: nullcontext("state"))


def _hooks(hook: str, wrapper: str, options: dict[str, Any], module: Any) -> tuple[Any, ...]:
    kinds = module.DDPCommunicationHookType
    return kinds[hook], kinds[wrapper], options


def _reading(module: Any, **how: bool) -> tuple[Any, ...]:
    return (module.Accelerator(dataloader_config=module.DataLoaderConfiguration(**how)),)


def _on_cpu(module: Any) -> None:
    """torch's DDP takes no device ids for a module on the CPU, whichever library prepares the other one."""
    real = torch.nn.parallel.DistributedDataParallel

    class Torch:
        class nn:
            Module, Parameter = torch.nn.Module, torch.nn.Parameter

            class parallel:
                @staticmethod
                def DistributedDataParallel(model: Any, **_: Any) -> Any:  # noqa: N802
                    return real(model)

        manual_seed, randn, testing = torch.manual_seed, torch.randn, torch.testing

    module.torch = Torch


def _without_float16(module: Any) -> None:
    module.is_fp16_available = lambda: False


NO_FLOAT16 = Deviation(
    raises="precision.fp16-unsupported",
    why="float32 and bfloat16 train as the check wants; float16 on a CPU is refused before anything is touched: torch "
    "scales no loss there, and accelerate trains without a scale",
)
OWN_FOLDERS = Deviation(
    raises="give every rank the same folder",
    why="every rank makes a temporary folder of its own and saves there; a checkpoint is one folder that all ranks "
    "see, which save_state checks before it counts. The row below has one folder",
)
EVEN = (
    "every rank has as many batches, so that none waits in a collective for one that is done; with even_batches=False "
    "every sample counts once in gather_for_metrics, and a rank that is out of samples reads one again"
)


def _on_gloo(hook: str, wrapper: str) -> tuple[Deviation, ...]:
    if hook.startswith("BATCHED"):
        why = (
            "torch's batched_powerSGD_hook packs all gradients of a bucket into one square matrix, and torch's own "
            "page says that it usually costs accuracy; POWER_SGD, or PowerSGDHook(batch_tensors_with_same_shape=True)"
        )
        return (Deviation(raises="does not offer comm_hook='batched_power_sgd'", why=why),)
    if "BF16" in (hook, wrapper):
        why = "refused before anything is touched: torch reduces bfloat16 over NCCL and XCCL only, and this is gloo"
        return (Deviation(raises="ddp.hook-dtype", why=why),)
    return ()


CHECKS: tuple[Check, ...] = (
    *(
        Check(script="test_script", name=name)
        for name in (
            "init_state_check",
            "process_execution_check",
            "test_split_between_processes_list",
            "test_split_between_processes_nested_dict",
            "test_split_between_processes_tensor",
            "test_split_between_processes_evenly",
        )
    ),
    Check(script="test_script", name="test_split_between_processes_dataset", arguments=_datasets),
    *(
        Check(script="test_script", name=name)
        for name in (
            "rng_sync_check",
            "dl_preparation_check",
            "central_dl_preparation_check",
            "custom_sampler_check",
            "check_seedable_sampler",
            "check_seedable_sampler_with_data_seed",
        )
    ),
    Check(
        script="test_script",
        name="check_seedable_sampler_in_batch_sampler_shard",
        worlds=(2,),
        deviations=(
            Deviation(
                raises="has no attribute 'sampler'",
                why="looks for accelerate's class SeedableRandomSampler inside the loader; prepkit's order follows "
                "from seed and epoch by itself (DL-10), which check_seedable_sampler and ..._with_data_seed hold",
            ),
        ),
    ),
    Check(
        script="test_script",
        name="training_check",
        options=(("use_seedable_sampler", False),),
        deviations=(NO_FLOAT16,),
    ),
    Check(
        script="test_script",
        name="training_check",
        options=(("use_seedable_sampler", True),),
        deviations=(NO_FLOAT16,),
    ),
    Check(
        script="test_script",
        name="training_check",
        options=(("use_seedable_sampler", True),),
        before=_without_float16,
        note="float32 and bfloat16",
    ),
    Check(
        script="test_script",
        name="training_check",
        options=(("use_seedable_sampler", False),),
        before=_without_float16,
        note="float32 and bfloat16",
    ),
    Check(script="test_script", name="test_trigger"),
    Check(
        script="test_script",
        name="test_reinstantiated_state",
        deviations=(
            Deviation(
                raises="DID NOT RAISE",
                why="wants an error where accelerate's shared state was reset under a living Accelerator; here each "
                "Accelerator has its own, and nothing can be taken away from it",
            ),
        ),
    ),
    *(
        Check(script="test_ops", name=name, arguments=_state)
        for name in (
            *("test_gather", "test_gather_object", "test_gather_non_contiguous", "test_broadcast"),
            *("test_pad_across_processes", "test_reduce_sum", "test_reduce_mean", "test_reduce_max"),
            *("test_op_checker", "test_copy_tensor_to_devices"),
        )
    ),
    Check(script="test_sync", name="test_dataloader_break"),
    Check(script="test_sync", name="test_noop_sync", arguments=_accelerator, worlds=(1,)),
    Check(script="test_sync", name="test_distributed_sync", arguments=_accelerator, worlds=(2,)),
    Check(script="test_sync", name="test_distributed_sync_multiple_fwd", arguments=_accelerator, worlds=(2,)),
    *(
        Check(
            script="test_sync",
            name=name,
            options=(("split_batches", split), ("dispatch_batches", dispatch), ("sync_each_batch", each)),
            worlds=(2,) if name == "test_gradient_accumulation" else (1, 2),
        )
        for name in ("test_gradient_accumulation", "test_gradient_accumulation_with_opt_and_scheduler")
        for split, dispatch, each in product((False, True), repeat=3)
    ),
    *(
        Check(script="test_distributed_data_loop", name=name, worlds=(2,))
        for name in ("test_default_ensures_even_batch_sizes", "test_pickle_accelerator")
    ),
    *(
        Check(
            script="test_distributed_data_loop",
            name=name,
            worlds=(2,),
            deviations=(Deviation(raises=raises, why=EVEN),),
        )
        for name, raises in (
            ("test_can_disable_even_batches", "AssertionError"),
            ("test_can_join_uneven_inputs", "AssertionError"),
            ("test_join_can_override_even_batches", "join_uneven_inputs(even_batches=False)"),
            ("test_join_can_override_for_mixed_type_dataloaders", "join_uneven_inputs(even_batches=False)"),
            (
                "test_join_raises_warning_for_iterable_when_overriding_even_batches",
                "join_uneven_inputs(even_batches=False)",
            ),
        )
    ),
    Check(
        script="test_distributed_data_loop",
        name="test_join_raises_warning_for_non_ddp_distributed",
        worlds=(2,),
        arguments=lambda module: (module.create_accelerator(),),
        deviations=(
            Deviation(
                raises="IndexError",  # of the list of warnings
                why="wants a warning that nothing is joined under FSDP; nothing needs joining under any engine, "
                "because every rank has as many batches",
            ),
        ),
    ),
    *(
        Check(script="test_distributed_data_loop", name="test_data_loader", worlds=(2,), arguments=make, note=note)
        for note, make in (
            ("shuffle=False", lambda module: _loader(module, batch_size=4)),
            ("shuffle=True", lambda module: _loader(module, batch_size=4, shuffle=True)),
            ("batch_sampler", lambda module: _loader(module, batch_sampler=_batch_sampler(module))),
            (
                "a BatchSampler as sampler",
                lambda module: _loader(
                    module, sampler=_batch_sampler(module), batch_size=None, collate_fn=module.default_collate
                ),
            ),
        )
    ),
    *(
        Check(
            script="test_distributed_data_loop",
            name=name,
            worlds=(2,),
            arguments=lambda module: (module.create_accelerator(),),
        )
        for name in ("test_stateful_dataloader",)
    ),
    *(
        Check(
            script="test_distributed_data_loop",
            name="test_stateful_dataloader_save_state",
            worlds=(2,),
            arguments=lambda module: (module.create_accelerator(),),
            before=before,
            note=note,
            deviations=deviations,
        )
        for before, note, deviations in (
            (None, "", (OWN_FOLDERS,)),
            (_one_folder, "one folder for all ranks", ()),
        )
    ),
    *(
        Check(
            script="test_ddp_comm_hook",
            name="test_ddp_comm_hook",
            worlds=(2,),
            before=_on_cpu,
            arguments=partial(_hooks, hook, wrapper, options),
            note=f"{hook}, {wrapper}, {options}",
            deviations=_on_gloo(hook, wrapper),
        )
        for hook, wrapper, options in (
            ("NO", "NO", {}),
            ("FP16", "NO", {}),
            ("BF16", "NO", {}),
            ("POWER_SGD", "NO", {}),
            ("POWER_SGD", "FP16", {}),
            ("POWER_SGD", "BF16", {}),
            ("POWER_SGD", "NO", {"matrix_approximation_rank": 2}),
            ("BATCHED_POWER_SGD", "NO", {}),
            ("BATCHED_POWER_SGD", "FP16", {}),
            ("BATCHED_POWER_SGD", "BF16", {}),
        )
    ),
    *(
        Check(
            script="external_deps.test_metrics",
            name="test_torch_metrics",
            options=(("num_samples", samples),),
            arguments=partial(_reading, split_batches=split, dispatch_batches=dispatch),
            note=f"split_batches={split}, dispatch_batches={dispatch}",
        )
        for samples, split, dispatch in (
            *((99, split, dispatch) for split, dispatch in product((True, False), repeat=2)),
            (512, False, False),
        )
    ),
    *(
        Check(script="external_deps.test_metrics", name=name)
        for name in (
            "test_gather_for_metrics_with_non_tensor_objects_iterable_dataset",
            "test_gather_for_metrics_drop_last",
        )
    ),
    Check(
        script="external_deps.test_metrics",
        name="test_gather_for_metrics_with_iterable_dataset",
        deviations=(
            Deviation(
                raises="AssertionError",
                why="wants accelerate's class DataLoaderDispatcher, in which rank 0 reads for all; prepkit's "
                "ranks read their own parts of a stream (DL-22) unless dispatch_batches=True. See the row below",
            ),
        ),
    ),
    Check(
        script="external_deps.test_metrics",
        name="test_gather_for_metrics_with_iterable_dataset",
        before=_any_loader,
        note="a prepared loader of any class",
    ),
    Check(script="test_notebook", name="test_can_initialize", worlds=(1,)),
)

DOWNLOADS = "downloads a model or a data set from the Hugging Face hub"
MERGED = (
    "needs two accelerators; merges files that accelerate's save_fsdp_model has written. Here accelerator.save_model "
    "writes the whole model in one call, and load_state reads shards on any number of ranks"
)
NOT_RUN: tuple[tuple[str, str, str], ...] = (
    ("test_cli", "main", "prints how many devices torch sees; uses nothing of accelerate"),
    (
        "test_merge_weights",
        ", ".join(f"test_merge_weights{name}" for name in ("_safetensors", "_command_safetensors", "_pytorch"))
        + ", test_merge_weights_command_pytorch",
        MERGED,
    ),
    (
        "test_notebook",
        ", ".join(("test_clean_cuda_fork", "test_static_rdzv_backend", "test_c10d_rdzv_backend"))
        + ", test_fault_tolerant, test_monitoring, test_problematic_imports",
        "tries notebook_launcher, which starts processes and prepares nothing; start them with torchrun",
    ),
    ("external_deps.test_metrics", "test_mrpc", DOWNLOADS),
    ("external_deps.test_checkpointing", "training_function", DOWNLOADS),
    ("external_deps.test_performance", "training_function", DOWNLOADS),
    ("external_deps.test_peak_memory_usage", "training_function", f"{DOWNLOADS}, and needs an accelerator"),
    ("external_deps.test_ds_multiple_model", "single_model_training, multiple_model_training", DOWNLOADS),
    ("external_deps.test_ds_alst_ulysses_sp", "the script", f"{DOWNLOADS}, and needs two accelerators"),
    (
        "external_deps.test_pippy",
        "test_bert, test_gpt2",
        "cuts a model into a pipeline for inference (prepare_pippy), and uses no Accelerator; prepkit has no pipelines",
    ),
    ("external_deps.test_zero3_integration", "init_torch_dist_then_launch_deepspeed", f"{DOWNLOADS}, and needs NCCL"),
)
"""Script, what of it does not run here, and why."""
