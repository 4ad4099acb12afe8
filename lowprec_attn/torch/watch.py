"""The watch over a training run, for PyTorch: a bare loop, Hugging Face's Trainer, Lightning."""

import contextlib
from pathlib import Path
from typing import Any

from lowprec_attn.diagnostics.watch import Framework, SummaryWriter, Watch, Write
from lowprec_attn.numerics import Numerics
from lowprec_attn.torch.capture import first_pass

# On the CPU: PyTorch has the GPU, and its memory.
_TORCH = Framework(
    first_pass,
    "lowprec_attn.torch.attention in place of scaled_dot_product_attention",
    on_cpu=True,
)


class TorchWatch(Watch):
    """A `Watch`, which may also be opened and closed by a trainer's hooks."""

    _open: contextlib.ExitStack | None = None
    _begun: int | None = None

    def begin(self, step: int) -> None:
        """Opens `step(step)`, once for all micro-batches of a step.

        One that a step left open which had no backward pass is closed without a record.
        """
        self.leave()
        if step == self._begun:
            return
        self._begun = step
        self._open = contextlib.ExitStack()
        self._open.enter_context(self.step(step))

    def end(self) -> None:
        """Closes what `begin` opened, and records it; nothing where nothing is open."""
        if self._open is not None:
            stack, self._open = self._open, None
            stack.close()

    def callback(self, base: type) -> Any:
        """A callback for a trainer, around the first micro-batch of each watched step.

        Args:
          base: `transformers.TrainerCallback` or `lightning.Callback`.

        Example:
          >>> Trainer(..., callbacks=[watch(every=500).callback(TrainerCallback)])
        """
        watched = self

        class Watching(base):
            """Hooks of both trainers, by their names."""

            def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                watched.begin(state.global_step)

            def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                watched.end()

            def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                watched.end()

            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                watched.end()

            def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
                watched.begin(trainer.global_step)

            def on_after_backward(self, *_: Any) -> None:
                watched.end()

            def on_exception(self, *_: Any) -> None:
                watched.leave()

        return Watching()

    def leave(self) -> None:
        """Closes what `begin` opened, without a record."""
        if self._open is not None:
            stack, self._open = self._open, None
            with contextlib.suppress(_LeftError):
                stack.__exit__(_LeftError, _LeftError(), None)


class _LeftError(Exception):
    """A step was left before its backward pass."""


def watch(
    every: int = 500,
    path: str | Path | None = None,
    *,
    write: Write | SummaryWriter | None = None,
    numerics: Numerics | str | None = None,
) -> TorchWatch:
    """Watches the attention of a run in PyTorch; see `diagnostics.watch`, and `capture` for models.

    At a watched step compiled functions run eagerly. The first sequence of the first micro-batch is
    copied to the host and measured on the CPU.

    Args:
      every, path, write, numerics: as of `diagnostics.watch`. With `lowprec_attn.torch.attention`
        in place of PyTorch's, numerics="normalized_delta".

    Example:
      >>> watched = watch(every=500, path="attention.jsonl")
      >>> for step, batch in enumerate(loader):
      ...     with watched.step(step):
      ...         model(**batch).loss.backward()
      ...     optimizer.step()
      ...     optimizer.zero_grad()
    """
    return TorchWatch(every, path, write, numerics, _TORCH)
