"""The training part of first_gpu.py: steps of one trainer whose switches are turned."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from first_gpu_parts import GIB, PartRecord, TrainSpec, profile_call, read_and_reset_peak_gib


def measure_training(what: TrainSpec, record: PartRecord, folder: Path) -> None:
    """Steps of one trainer whose switches are turned; memory beside that of the plan."""
    import tempfile

    from dlm_rag.config import load_config
    from dlm_rag.training.distributed import DistributedContext
    from dlm_rag.training.initial_model import InitialModel, allocate_denoiser
    from dlm_rag.training.model_init import open_initial_model
    from dlm_rag.training.planning.step_memory import StepMemoryEstimator
    from dlm_rag.training.supervised_tasks import PretrainTask
    from dlm_rag.training.task import Phase
    from dlm_rag.training.trainer import Trainer, free_memory

    class Fresh(InitialModel):
        """Weights drawn on the device; those of a real run are drawn on the host, the same anywhere."""

        def fill(self, denoiser: Any, device: Any, trained: bool = True) -> None:
            allocate_denoiser(denoiser, device)
            denoiser.initialise()

    class Sampled:
        """The same documents of random tokens in every step."""

        def examples(self, step: int, items: Sequence[int]) -> list[Any]:
            return sampled

    words = ["train.objective=pretrain", "train.optimizer=adamw", "train.max_steps=1000", *what.settings]
    config = load_config(None, words)
    origin = open_initial_model(config)
    shape = replace(origin.config, vocab_size=what.vocabulary)
    origin = Fresh(shape, origin.tokenizer, None, origin.seed, 0)
    task = PretrainTask(Sampled(), config, config.train, origin)
    sampled = task.sample_examples(shape, task.items)
    with tempfile.TemporaryDirectory() as scratch:
        trainer = Trainer(Phase(config, "", origin, Path(scratch)), task, DistributedContext(0, 1, 0))
    root: Any = trainer.root
    denoiser, device = trainer.denoiser, trainer.device
    record.add(
        parameters=sum(p.numel() for p in denoiser.parameters()), device=device.type,
        sequence_length=config.train.sequence_length, batch_tokens=config.train.batch_tokens,
    )  # fmt: skip
    for switch in what.switches:
        denoiser.activation_checkpointing = switch if switch in ("selective", "full") else "none"
        chunk = what.logit_chunk if switch == "logit_chunk" else config.train.logit_chunk
        root.logit_chunk = chunk
        if switch == "compile":
            denoiser.compile_layers()
        free_memory()
        for _ in range(2):
            trainer.step()
        read_and_reset_peak_gib(device)
        times = []
        for _ in range(what.steps):
            begun = time.perf_counter()
            metrics = trainer.step()
            times.append(time.perf_counter() - begun)
        speed = trainer.speed_metrics(metrics, sorted(times)[len(times) // 2])
        line = {
            "switch": f"{switch} {chunk}" if switch == "logit_chunk" else switch,
            **speed,
            "steps": times,
        }
        line["peak_gib"] = read_and_reset_peak_gib(device)
        changed = replace(
            config.train, activation_checkpointing=denoiser.activation_checkpointing, logit_chunk=chunk
        )
        task = PretrainTask(None, config, changed, origin)
        planned = StepMemoryEstimator(task, shape, changed, trainer.dtype).estimate(task.items)
        whole = planned.weights + planned.gradients + planned.optimizer + planned.activations
        record.add(line=line | {"planned_gib": whole / GIB})
        if switch == what.switches[0]:
            profile_call(lambda: [trainer.step() for _ in range(2)], record, folder)
