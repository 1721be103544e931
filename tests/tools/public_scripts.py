"""Runs public training scripts under accelerate and under ``prepkit.compat.accelerate``, and compares their losses.

``python -m tests.tools.public_scripts FOLDER...`` reads the scripts from checkouts of accelerate, peft, diffusers or
transformers, runs each as it is published but for the one import of ``Accelerator``, on one and on two gloo processes,
and prints a row for each. Nothing is downloaded: small data and models of our own stand in (``public_script_stands``,
``public_script_models``). ``--only WORD,WORD`` chooses scripts by parts of their paths, in that
order. It ends with 1 where a script that works under accelerate gives other losses, or none, without one of the face's
own refusals.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import socket
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from attrs import frozen

LIBRARIES = ("accelerate", "prepkit.compat.accelerate")
IMPORT = re.compile(r"^(\s*)from accelerate import (?=.*\bAccelerator\b)", re.MULTILINE)
IMPORTED = (
    *("accelerate.tracking", "datasets", "evaluate", "peft", "timm", "torchvision.transforms"),
    *("transformers.trainer", "transformers.models.auto.modeling_auto", "diffusers.pipelines.stable_diffusion"),
    *("torch.utils.tensorboard", "prepkit.compat.accelerate"),
)
"""Once, before processes are forked."""
EQUAL = "equal bit for bit"
LIMIT_S = int(os.environ.get("PUBLIC_SCRIPT_LIMIT_S", "240"))
"""Seconds for each run."""


@frozen
class Script:
    """One script, and what a user would type behind its name."""

    path: str
    arguments: str = ""
    worlds: tuple[int, ...] = (1, 2)


BY_FEATURE = "examples/by_feature/"
SMALL_PICTURES = "--output_dir {out} --resolution 32 --train_batch_size 2"
PICTURES = f"{SMALL_PICTURES} --report_to tensorboard"
SD = "--pretrained_model_name_or_path {sd} --max_train_steps 4 --seed 3"
SDXL = "--pretrained_model_name_or_path {sdxl}"
SUBJECT = "--instance_data_dir {images}/subject --instance_prompt dog"
ADAPTED = f"{SUBJECT} --num_dataloader_workers 0 --no_tracemalloc"
CONCEPT = "--train_data_dir {images}/subject --placeholder_token <it> --initializer_token a"
DATASET = "--dataset_name flowers --max_train_samples 11"
RESEARCH = "research_projects/"
HUBER = f"{RESEARCH}scheduled_huber_loss_training/"
DIFFUSION = {
    "text_to_image/train_text_to_image": f"{DATASET} --use_ema --gradient_accumulation_steps 2 --checkpointing_steps 2",
    "text_to_image/train_text_to_image_lora": f"{DATASET} --rank 2",
    "text_to_image/train_text_to_image_sdxl": f"{SDXL} {DATASET.replace('flowers', 'naruto')}",
    "text_to_image/train_text_to_image_lora_sdxl": f"{SDXL} {DATASET} --rank 2",
    "dreambooth/train_dreambooth": f"{SUBJECT} --train_text_encoder",
    "dreambooth/train_dreambooth_lora": f"{SUBJECT} --rank 2 --gradient_accumulation_steps 2",
    "dreambooth/train_dreambooth_lora_sdxl": f"{SDXL} {SUBJECT} --rank 2",
    "textual_inversion/textual_inversion": CONCEPT,
    "textual_inversion/textual_inversion_sdxl": f"{SDXL} {CONCEPT}",
    "instruct_pix2pix/train_instruct_pix2pix": f"{DATASET} --conditioning_dropout_prob 0.1 --use_ema",
    "instruct_pix2pix/train_instruct_pix2pix_sdxl": f"{SDXL} {DATASET}",
    "controlnet/train_controlnet": f"{DATASET} --controlnet_model_name_or_path {{controlnet}} "
    "--gradient_accumulation_steps 2",
    "controlnet/train_controlnet_sdxl": f"{SDXL} {DATASET}",
    "t2i_adapter/train_t2i_adapter_sdxl": f"{SDXL} {DATASET} --adapter_model_name_or_path {{adapter}}",
    "custom_diffusion/train_custom_diffusion": f"{SUBJECT} --modifier_token <new1> --no_safe_serialization",
    f"{RESEARCH}lora/train_text_to_image_lora": DATASET,
    f"{RESEARCH}instructpix2pix_lora/train_instruct_pix2pix_lora": DATASET,
    f"{RESEARCH}multi_token_textual_inversion/textual_inversion": CONCEPT,
    f"{HUBER}text_to_image/train_text_to_image": DATASET,
    f"{HUBER}text_to_image/train_text_to_image_lora": DATASET,
    f"{HUBER}dreambooth/train_dreambooth": SUBJECT,
    f"{HUBER}dreambooth/train_dreambooth_lora": SUBJECT,
    "lora_dreambooth/train_dreambooth": f"{ADAPTED} --use_lora",
    "oft_dreambooth/train_dreambooth": f"{ADAPTED} --use_oft",
    "deft_dreambooth/train_dreambooth": ADAPTED,
    "hra_dreambooth/train_dreambooth": ADAPTED,
    "boft_dreambooth/train_dreambooth": ADAPTED,
    "stable_diffusion/train_dreambooth": f"{SUBJECT} lora",
}
"""Scripts of diffusers and peft that train on Stable Diffusion, and what is typed beside its folder."""
FROM_PICTURES = {
    "unconditional_image_generation/train_unconditional": "--train_data_dir {images}/labelled "
    "--model_config_name_or_path {unet} --num_epochs 1 --eval_batch_size 1 --ddpm_num_steps 20 "
    "--ddpm_num_inference_steps 2 --save_images_epochs 5 --use_ema",
    "vqgan/train_vqgan": f"{DATASET} --model_config_name_or_path {{vq}} --max_train_steps 4 --seed 3",
    f"{RESEARCH}autoencoderkl/train_autoencoderkl": f"{DATASET} --pretrained_model_name_or_path {{vae}} "
    "--max_train_steps 4 --seed 3 --disc_start 100",
    f"{RESEARCH}consistency_training/train_cm_ct_unconditional": "--train_data_dir {images}/labelled "
    "--max_train_steps 4 --discretization_s_0 10 --discretization_s_1 20",
}
TRAINER = "--output_dir {out} --per_device_train_batch_size 4 --num_train_epochs 2 --seed 3"
TEXT = "--model_name_or_path {bert} --per_device_eval_batch_size 4"
READ = "--train_file {data}/%s.json --validation_file {data}/%s_test.json"


def _logged(path: str) -> str:
    """What each is given, with the logger by the name that the script has for it."""
    return PICTURES.replace("--report_to", "--logger") if path.endswith("train_unconditional") else PICTURES


NO_TRAINER = {
    "text-classification/run_glue": f"{TEXT} {READ % (('pairs',) * 2)} --checkpointing_steps epoch",
    "language-modeling/run_clm": f"--model_name_or_path {{gpt2}} {READ % (('texts',) * 2)} --block_size 16 "
    "--gradient_accumulation_steps 2 --checkpointing_steps 3",
    "language-modeling/run_fim": f"--model_name_or_path {{gpt2}} {READ % (('texts',) * 2)} --block_size 16",
    "language-modeling/run_mlm": f"{TEXT} {READ % (('texts',) * 2)} --max_seq_length 16",
    "multiple-choice/run_swag": f"{TEXT} {READ % (('choices',) * 2)} --max_seq_length 16",
    "question-answering/run_qa": f"{TEXT} {READ % (('questions',) * 2)} --max_seq_length 24 --doc_stride 8",
    "token-classification/run_ner": f"{TEXT} {READ % (('tags',) * 2)} --task_name ner",
    "summarization/run_summarization": f"--model_name_or_path {{t5}} {READ % (('summaries',) * 2)} --num_beams 1 "
    "--max_target_length 8 --max_source_length 16 --source_prefix it --text_column text --summary_column summary",
    "translation/run_translation": f"--model_name_or_path {{t5}} {READ % (('translations',) * 2)} --source_lang en "
    "--target_lang ro --max_target_length 8 --max_source_length 16 --num_beams 1",
    "image-classification/run_image_classification": "--model_name_or_path {vit} --dataset_name flowers "
    "--train_val_split 0.3 --ignore_mismatched_sizes --label_column_name label --max_train_steps 6",
    "image-pretraining/run_mim": "--model_name_or_path {vit} --dataset_name flowers --mask_patch_size 8 "
    "--train_val_split 0.3 --image_column_name image --per_device_eval_batch_size 4 --max_train_steps 6",
}
"""Scripts of transformers, without the end of their names."""
SCRIPTS = (
    Script("examples/nlp_example.py", "--cpu"),
    Script("examples/complete_nlp_example.py", "--cpu --checkpointing_steps epoch --output_dir {out} --with_tracking"),
    Script("examples/cv_example.py", "--cpu --data_dir {pictures}"),
    Script("examples/complete_cv_example.py", "--cpu --data_dir {pictures} --checkpointing_steps 1 --output_dir {out}"),
    Script(f"{BY_FEATURE}automatic_gradient_accumulation.py", "--cpu"),
    Script(f"{BY_FEATURE}checkpointing.py", "--cpu --checkpointing_steps epoch --output_dir {out}"),
    Script(f"{BY_FEATURE}cross_validation.py", "--cpu --num_folds 2"),
    Script(f"{BY_FEATURE}ddp_comm_hook.py", "--cpu --ddp_comm_hook fp16"),
    Script(f"{BY_FEATURE}early_stopping.py", "--cpu"),
    Script(f"{BY_FEATURE}gradient_accumulation.py", "--cpu --gradient_accumulation_steps 2"),
    Script(
        f"{BY_FEATURE}gradient_accumulation_for_autoregressive_models.py",
        "--cpu --gradient_accumulation_steps 2 --per_device_batch_size 2",
    ),
    Script(f"{BY_FEATURE}local_sgd.py", "--cpu --gradient_accumulation_steps 2 --local_sgd_steps 2"),
    Script(f"{BY_FEATURE}memory.py", "--cpu"),
    Script(f"{BY_FEATURE}multi_process_metrics.py", "--cpu"),
    Script(f"{BY_FEATURE}profiler.py", "--cpu"),
    Script(f"{BY_FEATURE}schedule_free.py", "--cpu"),
    Script(f"{BY_FEATURE}tracking.py", "--cpu --with_tracking --project_dir {out}"),
    Script(
        f"{BY_FEATURE}deepspeed_with_config_support.py",
        "--dataset_name texts --model_name_or_path tiny --output_dir {out} --num_train_epochs 2 --block_size 16 "
        "--per_device_train_batch_size 2 --gradient_accumulation_steps 2 --seed 3 --checkpointing_steps epoch",
    ),
    Script(f"{BY_FEATURE}fsdp_with_peak_mem_tracking.py", "--cpu --model_name_or_path bert --output_dir {out}"),
    Script(
        "examples/sequence_classification/peft_no_lora_accelerate.py",
        "--model_name_or_path tiny --per_device_train_batch_size 4 --per_device_eval_batch_size 4 --output_dir {out}",
    ),
    *(
        Script(
            f"examples/{RESEARCH}dreambooth_inpaint/{name}.py",
            f"{SMALL_PICTURES} {SD} {SUBJECT}".replace("{sd}", "{sd_inpaint}"),
        )
        for name in ("train_dreambooth_inpaint", "train_dreambooth_inpaint_lora")
    ),
    Script("examples/conditional_generation/peft_lora_seq2seq_accelerate_fsdp.py"),
    *(Script(f"examples/{path}.py", f"{PICTURES} {SD} {others}") for path, others in DIFFUSION.items()),
    *(Script(f"examples/{path}.py", f"{_logged(path)} {others}") for path, others in FROM_PICTURES.items()),
    *(Script(f"examples/pytorch/{path}_no_trainer.py", f"{TRAINER} {given}") for path, given in NO_TRAINER.items()),
)


def one_process(script: str, arguments: Sequence[str], library: str, out: Path) -> None:
    """Runs the script here, and leaves its losses and its end in a file."""
    import faulthandler

    import numpy
    import torch

    from tests.tools.public_script_stands import stand_in

    faulthandler.dump_traceback_later(LIMIT_S * 0.9)
    heard: list[float] = []
    told: dict[str, Any] = {"heard": heard, "error": ""}
    stand_in(heard.append)
    backward = torch.Tensor.backward

    def listening(self: torch.Tensor, *given: Any, **named: Any) -> None:
        heard.append(float(self.detach().float().sum()))
        backward(self, *given, **named)

    torch.Tensor.backward = listening  # type: ignore[assignment]
    kept, wrap = [], torch.nn.parallel.DistributedDataParallel.__init__

    def wrapping(self: Any, *given: Any, **named: Any) -> None:
        kept.append(self)  # a wrapper that goes before its process may wait for a thread of gloo for ever
        wrap(self, *given, **named)

    torch.nn.parallel.DistributedDataParallel.__init__ = wrapping  # type: ignore[method-assign]
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(7)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    text = IMPORT.sub(rf"\1from {library} import ", Path(script).read_text())
    space: Any = sys.modules["__main__"].__dict__
    space |= {"__name__": "__main__", "__file__": script}
    try:
        exec(compile(text, script, "exec"), space)  # a script that the user has named
    except SystemExit as end:
        told["error"] = "" if end.code in (None, 0) else f"SystemExit: {end.code}"
    except BaseException as error:
        told["error"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        traceback.print_exc()
    out.write_text(json.dumps(told))


def run(script: str, arguments: Sequence[str], library: str, world: int, folder: Path) -> list[dict[str, Any]]:
    """What each process has heard; forked, so that torch and its friends are imported once."""
    port, children = free_port(), []
    folder.mkdir(parents=True)
    for rank in range(world):
        if child := os.fork():
            children.append(child)
            continue
        os.setpgid(0, 0)
        if world > 1:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
            os.environ |= {"LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ |= {"ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(folder)
        one_process(script, arguments, library, folder / f"{rank}.json")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    wait(children)
    files = [folder / f"{rank}.json" for rank in range(world)]
    return [json.loads(file.read_text()) if file.exists() else {"heard": [], "error": "no end"} for file in files]


def wait(children: list[int]) -> None:
    """Until all have ended, or time is up for those that have not."""
    until = time.monotonic() + LIMIT_S
    left = list(children)
    while left and time.monotonic() < until:
        left = [child for child in left if os.waitpid(child, os.WNOHANG)[0] == 0]
        time.sleep(0.05)
    for child in left:
        os.kill(child, 9)
        os.waitpid(child, 0)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def compared(theirs: list[dict[str, Any]], ours: list[dict[str, Any]]) -> tuple[str, str]:
    """The outcome in a word, and its reason."""
    failed = next((one["error"] for one in theirs if one["error"]), "")
    if failed:
        return "not run", f"fails under accelerate as well: {failed}"
    if refused := next((one["error"] for one in ours if one["error"]), ""):
        own = refused.startswith(("NotOffered", "PlanRejected"))
        return ("refused" if own else "FAILED"), refused
    count, largest = 0, 0.0
    for rank, (one, other) in enumerate(zip(theirs, ours, strict=True)):
        if len(one["heard"]) != len(other["heard"]):
            return "OTHER", f"rank {rank}: {len(other['heard'])} losses and metrics for {len(one['heard'])}"
        for at, (expected, found) in enumerate(zip(one["heard"], other["heard"], strict=True)):
            if not math.isclose(expected, found, rel_tol=1e-5, abs_tol=1e-7):
                return "OTHER", f"rank {rank}, number {at}: {found:.7g} for {expected:.7g}"
            largest = max(largest, abs(found - expected))
        count += len(one["heard"])
    if not count:
        return "not run", "trains nothing under accelerate"
    shown = f"differs by at most {largest:.1e}" if largest else EQUAL
    return shown, f"{count} losses and metrics"


def rows(folders: Sequence[str], words: str, kept: Path) -> Counter[str]:
    """Prints a row for each script in the folders; returns how many came out how."""
    named_operators()
    for name in IMPORTED:
        if find_spec(name.partition(".")[0]):
            import_module(name)
    from tests.tools.public_script_models import FOLDERS, folder_of
    from tests.tools.public_script_stands import picture_folder, text_files

    outcomes: Counter[str] = Counter()
    given = {"pictures": picture_folder(kept / "pictures"), "texts": text_files(kept / "texts")}
    print("| script | processes | outcome | reason |\n|---|--:|---|---|")
    found = [(Path(folder).resolve(), one) for folder in folders for one in SCRIPTS if Path(folder, one.path).is_file()]
    wanted = words.split(",")
    chosen = [(root, one) for word in wanted for root, one in found if word in one.path]
    for number, (root, script) in enumerate(dict.fromkeys(chosen)):
        asked = [name for name in FOLDERS if f"{{{name}}}" in script.arguments]
        given |= {name: str(folder_of(name, kept / "folders")) for name in asked}
        for world in script.worlds:
            said = []
            for library in LIBRARIES:
                folder = kept / f"{number}_{world}_{library}"
                arguments = script.arguments.format(out=folder / "out", **given).split()
                said.append(run(str(root / script.path), arguments, library, world, folder))
            outcome, why = compared(*said)
            outcomes["within 1e-5" if outcome.startswith("differs") else outcome] += 1
            shown = script.path.removeprefix("examples/")
            print(f"| {shown} | {world} | {outcome} | {why[:300].replace('|', '/')} |", flush=True)
    return outcomes


def named_operators() -> None:
    """Names the operators that a torchvision for another build of torch lacks; transforms, which use none, import."""
    import torch

    try:
        import torchvision  # noqa: F401
    except ImportError:
        return
    except RuntimeError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        OPERATORS.append(library)  # they go with it


OPERATORS: list[object] = []


def main(arguments: Sequence[str]) -> int:
    """See above."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.public_scripts")
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="a checkout of one of the four libraries")
    parser.add_argument("--only", default="", metavar="WORD", help="parts of scripts' paths, between commas")
    parser.add_argument("--keep", metavar="FOLDER", help="where what the scripts write is left")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        outcomes = rows(chosen.folders, chosen.only, Path(chosen.keep or temporary))
    counted = outcomes.total() - outcomes["not run"]
    said = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
    print(f"\nOf {counted} runs that work under accelerate {outcomes[EQUAL]} are equal ({said}).")
    return int(outcomes["FAILED"] + outcomes["OTHER"] > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
