"""What a trainer asks of a task: how a step's parts are made, what their loss is, what is told of them.

Supervised fine-tuning, pre-training and adaptation are three (`supervised_tasks.py`), learning by reward a
fourth (`task.py`): its `can_prefetch` is False, so that its parts are made with the weights of the step,
by a decoder around the denoiser that `objective` was given.
"""

from collections.abc import Hashable, Sequence
from typing import Any, Protocol

from torch import nn

from dlm_rag.model.context_parallel import ContextParallel
from dlm_rag.model.denoiser import Denoiser

TaskState = dict[str, Any]  # what JSON can hold; empty at first


class Task(Protocol):
    """A step consists of `items`, which processes share; a process computes its own in one or more parts.

    What a part is, only the task knows. Apart from what it was built with, a task depends on its arguments
    alone: what changes over a run is its `TaskState`, which the trainer keeps and saves.
    """

    name: str  # what its state is saved under
    items: int  # of a step, over all processes
    rows: int  # in a step
    updates: int  # of the weights that a step makes with its parts
    can_prefetch: bool  # whether parts may be made while the step before is computed, by another thread

    def objective(self, denoiser: Denoiser, share: ContextParallel | None) -> nn.Module:
        """The loss as a module that holds the denoiser: what DDP and FSDP wrap; called as

            objective(part, counts, terms) -> (loss, {name: sum})

        with the `counts` of the whole step, by which the loss is divided: the losses of all parts on all
        processes add up to that of the step, and so do the sums, scalars on the device without gradients.

        A `reference` of the module, another denoiser, gets the weights that the phase began with. share:
        processes that have a stretch each of the same items.
        """
        ...

    def conditions(self, state: TaskState) -> Hashable:
        """What of the state the parts of a step depend on."""
        ...

    def make_microbatch(self, step: int, items: Sequence[int], conditions: Any) -> Any:
        """Some items of step number `step` of the phase.

        Where parts are not made ahead of time, the denoiser may be called meanwhile, by every process as
        often as it needs (`Trainer.evaluation_mode`).
        """
        ...

    def loss_weights(self, step: int) -> Any:
        """What changes in the loss from step to step of the phase."""
        ...

    def count_microbatch(self, part: Any, terms: Any) -> dict[str, float]:
        """What is known of a part beforehand, always under the same names: `rows`, `tokens` that the layers
        run, `supervised` ones whose logits are computed, and whatever the task's own loss and metrics need.
        """
        ...

    def metrics(
        self, sums: dict[str, float], counts: dict[str, float], state: TaskState
    ) -> dict[str, float]:
        """What is told of a step, `loss` included, from sums and counts over all parts and processes."""
        ...

    def advance(self, state: TaskState, metrics: dict[str, Any], counts: dict[str, float]) -> TaskState:
        """The state after a step."""
        ...
