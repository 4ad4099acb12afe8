"""Watches a training run in PyTorch: a bare loop, Hugging Face's Trainer or Lightning."""

import contextlib
import weakref
from pathlib import Path
from typing import Any

from lowprec_attn.diagnostics.watch import Framework, SummaryWriter, Watch, Write
from lowprec_attn.numerics import Numerics
from lowprec_attn.torch.capture import first_pass

# Arrays are measured on the CPU, because PyTorch uses the GPU and its memory.
_TORCH = Framework(
    first_pass, "lowprec_attn.torch.attention in place of scaled_dot_product_attention", on_cpu=True
)


class TorchWatch(Watch):
    """A `Watch` that a trainer's hooks can open and close as well."""

    _open: contextlib.ExitStack | None = None
    _begun: int | None = None

    def begin(self, step: int) -> None:
        """Opens `step(step)`, only once for all micro-batches of a step.

        If an earlier step is still open because it had no backward pass, that step is closed
        without a record, and counts as not yet begun.
        """
        self.leave()
        if step == self._begun:
            return
        self._begun = step
        self._open = contextlib.ExitStack()
        _left_open.add(self)
        self._open.enter_context(self.step(step))

    def end(self) -> None:
        """Closes and records what `begin` opened; does nothing if nothing is open."""
        if self._open is not None:
            stack, self._open = self._open, None
            _left_open.discard(self)
            stack.close()

    def callback(self, base: type) -> Any:
        """Returns a trainer's callback that watches the first micro-batch of each watched step.

        Args:
          base: `transformers.TrainerCallback` or `lightning.Callback`.

        Example:
          >>> Trainer(..., callbacks=[watch(every=500).callback(TrainerCallback)])
        """
        watched = self

        class Watching(base):
            """The hooks of both trainers, under the names that each trainer calls."""

            def _begin_training(self, *_: Any, **__: Any) -> None:
                watched.begin_training()

            def _end(self, *_: Any, **__: Any) -> None:
                watched.end()

            on_train_begin = on_train_start = _begin_training
            on_substep_end = on_pre_optimizer_step = on_step_end = on_after_backward = _end

            def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                watched.begin(state.global_step)

            def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
                watched.begin(trainer.global_step)

            def on_exception(self, *_: Any) -> None:
                watched.leave()

        return Watching()

    def begin_training(self) -> None:
        """Closes what any watch of an earlier training left open, without recording it.

        Hugging Face's Trainer calls no hook when a step raises, so such a step stays open.
        """
        for other in [*_left_open]:
            other.leave()
        self._begun = None

    def leave(self) -> None:
        """Closes what `begin` opened without recording it, so that its step can begin again."""
        if self._open is not None:
            stack, self._open, self._begun = self._open, None, None
            _left_open.discard(self)
            with contextlib.suppress(_LeftError):
                stack.__exit__(_LeftError, _LeftError(), None)


# The watches whose `begin` has opened a step that neither `end` nor `leave` has closed.
_left_open: weakref.WeakSet[TorchWatch] = weakref.WeakSet()


class _LeftError(Exception):
    """A step was left before its backward pass."""


def watch(
    every: int = 500,
    path: str | Path | None = None,
    *,
    write: Write | SummaryWriter | None = None,
    numerics: Numerics | str | None = None,
) -> TorchWatch:
    """Watches the attention of a run in PyTorch; see `diagnostics.watch`.

    `capture` says which models it can read. At a watched step, compiled functions run eagerly. The
    first sequence of the first micro-batch is copied to the host and measured on the CPU.

    Args:
      every, path, write, numerics: see `diagnostics.watch`. Pass numerics="normalized_delta" if the
        model calls `lowprec_attn.torch.attention` in place of PyTorch's function.

    Example:
      >>> watched = watch(every=500, path="attention.jsonl")
      >>> for step, batch in enumerate(loader):
      ...     with watched.step(step):
      ...         model(**batch).loss.backward()
      ...     optimizer.step()
      ...     optimizer.zero_grad()
    """
    return TorchWatch(every, path, write, numerics, _TORCH)
