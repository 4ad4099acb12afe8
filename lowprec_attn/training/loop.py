"""The training loop: dispatch, fetch, record, save, stop.

The loop never waits for the step that it has just dispatched. It fetches the metrics of step n
while step n + 1 runs.

Every record belongs to a step. Validation and diagnostics of step s use the parameters before
update s. Loss and gradient norm of step s belong to update s. A run that is resumed at s therefore
writes exactly the records that are missing. Diagnostics use the first sequence of the batch of
step s. After the last step they use the batch that the next step would have taken.

The checkpoint of the first step is complete before the first record is written. A run that is
killed at any instant therefore has both records and a checkpoint to continue from, or neither.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import grain
import jax
import jax.numpy as jnp
import numpy as np

from lowprec_attn import hosts
from lowprec_attn.counts import many
from lowprec_attn.data.batches import Batch, validation_batches
from lowprec_attn.data.order import OrderRecord
from lowprec_attn.data.tokens import Corpus
from lowprec_attn.runs.checkpoint import Checkpoints
from lowprec_attn.runs.instability.rollbacks import Reason
from lowprec_attn.runs.metrics import MetricsWriter
from lowprec_attn.runs.run_dir import RunDir
from lowprec_attn.training import announcement
from lowprec_attn.training.devices import Devices, Program
from lowprec_attn.training.instability.nonfinite import find_culprit
from lowprec_attn.training.instability.rescue import Rescue
from lowprec_attn.training.instability.watch import Watch, kept_records
from lowprec_attn.training.measurement import Measurement
from lowprec_attn.training.progress import Progress
from lowprec_attn.training.resources import heap
from lowprec_attn.training.settings import TrainSettings
from lowprec_attn.training.signals import Directions, Signals
from lowprec_attn.training.step import StepMetrics, TrainState, make_steps, root_key, step_key

EXIT_DONE = 0
EXIT_BROKEN = 3  # a loss was not finite, or exploded and the config says to stop


class Run(NamedTuple):
    """The parts of a run that stay the same from the first step to the last."""

    settings: TrainSettings
    devices: Devices
    program: Program
    corpus: Corpus
    run_dir: RunDir
    checkpoints: Checkpoints
    metrics: MetricsWriter
    order: OrderRecord
    rescue: Rescue


class _Pending(NamedTuple):
    """A dispatched step whose metrics have not been fetched."""

    batch: Batch
    arrays: tuple[jax.Array, jax.Array]
    data_state: dict[str, Any]  # state of the data iterator before it drew the batch
    metrics: StepMetrics
    signals: Signals | None
    directions: Directions | None  # from the last measurement before this step


class Loop:
    """A running loop: the live state, and the step whose metrics are still on the device.

    Args:
      run: the parts that do not change.
      state: state to start from.
      data: iterator whose next batch belongs to step `state.step`.
      saved_step: step of this run's checkpoint that `state` comes from, None if there is none.
      directions: directions of the last measurement before `state`, None if there is none.
    """

    def __init__(
        self,
        run: Run,
        state: TrainState,
        data: grain.DatasetIterator,
        saved_step: int | None,
        directions: Directions | None,
    ) -> None:
        self.fixed, self.state, self.data = run, state, data
        self.root = root_key(run.settings)
        self.pending: _Pending | None = None
        self.data_state = data.get_state()
        self.saved_step = saved_step
        self.begins = saved_step is None
        self.goes_on = False  # whether a step has been taken
        self.progress: Progress | None = None
        kept = kept_records(run.run_dir, int(state.step))
        before = next((record["signals"] for record in kept if "signals" in record), None)
        self.measurement = Measurement(run.settings, run.devices, directions, before)
        self.watch = Watch(
            kept, int(state.step), run.rescue.excess_limit, run.metrics.write, self._say
        )

    def run(self) -> int | None:
        """Takes all remaining steps.

        Returns:
          The exit code, or None if the run goes back to a checkpoint. Another loop then continues.
        """
        settings, start = self.fixed.settings, int(self.state.step)
        if self.begins:
            self._save(start)  # a thread writes the checkpoint while the step compiles
        with (
            Progress(settings, start) as self.progress,
            hosts.stop_requests(self.progress.say) as stop_after,
        ):
            try:
                for step in range(start, settings.steps):
                    if self._exploded_before(step):
                        return self._stop_exploded(step)
                    self._before(step)
                    self._dispatch(step)
                    if step == start:  # everything that a step needs is compiled now
                        heap.settle()
                    if (code := stop_after(step)) is not None:
                        return self._stop_early(step + 1, code)
                self._fetch()
            except _NotFiniteError as stopped:
                return self._stop_not_finite(stopped.pending)
            except _UndoneError as undone:
                return self._roll_back(undone, stop_after)
        self._save(settings.steps)
        return self._finish()

    def _before(self, step: int) -> None:
        """Saves and validates if either is due, with the parameters before the step."""
        settings = self.fixed.settings
        if step > 0 and _due(settings.checkpoint_every, step):
            self._fetch()
            self._save(step)
        if step > 0 and _due(settings.eval_every, step):
            self._fetch()
            self._write_validation(step)

    def _dispatch(self, step: int) -> None:
        data_state = self.data_state
        batch = next(self.data)
        self.data_state = self.data.get_state()
        arrays = self.fixed.devices.put(batch)
        directions, signals = self.measurement.across.directions, None
        if _due(self.fixed.settings.diagnostics_every, step):
            signals = self.measurement.signals(self.state.params, step, arrays)
        self.state, metrics = self.fixed.program.train(self.state, *arrays, self.root)
        # Copies that are requested later would queue behind the next step.
        for array in jax.tree.leaves((metrics, signals)):
            array.copy_to_host_async()
        dispatched = _Pending(batch, arrays, data_state, metrics, signals, directions)
        self._fetch()
        self.pending = dispatched

    def _fetch(self) -> None:
        """Waits for the pending step and records it.

        Raises:
          _NotFiniteError: the update was withheld, and no rollback is possible.
          _UndoneError: the run goes back, because the update was withheld or because the loss was
            in excess for long enough.
        """
        if self.pending is None:
            return
        pending, self.pending = self.pending, None
        self._complete_first_save()
        step = int(pending.batch["step"])
        if pending.signals is not None:
            self._write_signals(step, pending.signals)
        metrics = jax.device_get(pending.metrics)
        self.fixed.order.append(step, pending.batch["starts"])
        recorded = {name: getattr(metrics, name) for name in _RECORDED}
        self.fixed.metrics.write(step, {k: v for k, v in recorded.items() if v is not None})
        possible = self.fixed.rescue.possible
        if not metrics.applied:
            raise _UndoneError(step, "not finite") if possible else _NotFiniteError(pending)
        loss = float(metrics.loss)
        self.watch.add_loss(step, loss)
        if possible and self.watch.enough is not None:
            raise _UndoneError(step, "excess")
        if not self.goes_on:  # a failure of an earlier attempt no longer says how the run ended
            self.goes_on = True
            hosts.first_only(self.fixed.run_dir.failure.unlink)(missing_ok=True)
        assert self.progress is not None
        seconds, tokens_done = self.progress.advance(loss)
        self.fixed.metrics.write_throughput(step, seconds, tokens_done)

    def _exploded_before(self, step: int) -> bool:
        """Whether the loss had been in excess for too long two steps before `step`."""
        # When the loss of a step is fetched, the next step is already running. A resumed run knows
        # that loss earlier. It takes the next step all the same, so that both have the same
        # records.
        return self.watch.enough is not None and step >= self.watch.enough + 2

    def _say(self, text: str) -> None:
        (hosts.say if self.progress is None else self.progress.say)(text)

    def _write_signals(self, step: int, signals: Signals) -> None:
        values = self.measurement.values(signals)
        self.fixed.metrics.write(step, {"signals": values})
        self.watch.add_signals(step, values)

    def _write_validation(self, step: int) -> float:
        self._complete_first_save()
        settings, run = self.fixed.settings, self.fixed
        batches = validation_batches(
            run.corpus.val,
            settings.model.context,
            settings.batch_size,
            settings.eval_batches,
            shard=run.devices.shard,
            parts=settings.accumulation_steps,
        )
        losses = [
            run.program.evaluate(self.state.params, *run.devices.put(batch), self.root)
            for batch in batches
        ]
        loss = float(np.mean(jax.device_get(losses), dtype=np.float64))
        run.metrics.write(step, {"val_loss": loss})
        if not math.isfinite(loss):
            self._say(f"the validation loss of step {step} is {loss}")
        return loss

    def _complete_first_save(self) -> None:
        """Waits for the first checkpoint, which must be complete before the first record.

        Records without a checkpoint then always mean that the checkpoint was lost.
        """
        if self.begins:
            self.fixed.checkpoints.wait()
            self.begins = False

    def _save(self, step: int) -> None:
        if self.saved_step != step:
            run, written = self.fixed, {}
            run.metrics.flush()  # a resumed run will not write these records again
            run.order.flush()
            if hosts.is_first():
                written = {
                    run.run_dir.metrics.name: run.metrics.written_before(step),
                    run.run_dir.data_order.name: run.order.written_before(step),
                }
                if run.rescue.record.rollbacks:
                    written[run.run_dir.rollbacks.name] = run.rescue.record.fingerprint
            keep_from = run.rescue.keep_from(step, self.watch.onset)
            run.checkpoints.save(
                step,
                self.state,
                self.data_state,
                written,
                keep_from,
                self.measurement.across.directions,
            )
            self.saved_step = step

    def _roll_back(
        self, undone: "_UndoneError", stop_after: Callable[[int], int | None]
    ) -> int | None:
        """Records that the run goes back; the next loop, in this or another process, does it."""
        onset = undone.step if self.watch.onset is None else self.watch.onset
        self.fixed.metrics.flush()
        self.fixed.rescue.roll_back(onset, undone.step, undone.reason)
        code = stop_after(undone.step)  # asked last: the next loop would miss the request
        if code is not None:
            hosts.say("stopped by a signal; the same command continues from there")
        return code

    def _stop_early(self, step: int, code: int) -> int:
        """Saves the state after the steps taken so far."""
        self._fetch()
        self._save(step)
        taken = many(step, "step")
        hosts.say(f"stopped by a signal after {taken}; the same command continues from there")
        return code

    def _stop_not_finite(self, pending: _Pending) -> int:
        """Saves the last good state, and finds the first non-finite value.

        The live state is the last good one, because the update of this step and that of the next
        step were withheld.
        """
        step = int(pending.batch["step"])
        self.state = self.state._replace(failed=jnp.zeros_like(self.state.failed))
        self.data_state = pending.data_state
        self.measurement.across.directions = pending.directions
        self._save(step)
        culprit = find_culprit(
            self.fixed.settings,
            make_steps(self.fixed.settings, self.fixed.devices.attend),
            self.state.params,
            pending.arrays,
            step_key(self.root, jnp.int32(step)),
            jit=self.fixed.devices.jit,
        )
        if pending.signals is None:  # otherwise they are recorded already
            signals = self.measurement.signals(self.state.params, step, pending.arrays)
            self._write_signals(step, signals)
        return self._fail({"step": step, **culprit._asdict(), "message": str(culprit)})

    def _fail(self, failure: dict[str, Any]) -> int:
        """Brings checkpoint and records to the disk, and then records that the run has failed."""
        self.fixed.checkpoints.wait()
        self.fixed.metrics.flush()
        announcement.report_failure(self.fixed.run_dir, failure)
        return EXIT_BROKEN

    def _stop_exploded(self, step: int) -> int:
        """Saves and validates once more, and records that the loss exploded."""
        self._fetch()
        self._save(step)
        self._write_validation(step)
        explosion = self.watch.explosion
        message = f"the loss exploded at step {explosion}; stopped after {many(step, 'step')}"
        return self._fail({"step": step, "explosion": explosion, "message": message})

    def _finish(self) -> int:
        settings = self.fixed.settings
        loss = self._write_validation(settings.steps)
        if settings.diagnostics_every:
            arrays = self.fixed.devices.put(next(self.data))
            signals = self.measurement.signals(self.state.params, settings.steps, arrays)
            self._write_signals(settings.steps, signals)
        self.fixed.checkpoints.prune()  # this waits for the last checkpoint
        self.fixed.metrics.flush()
        if not math.isfinite(loss):
            message = (
                f"the validation loss is {loss}, while the losses of training are finite: look at "
                "the held-out text's batches, or at attention's arithmetic"
            )
            return self._fail({"step": settings.steps, "message": message})
        announcement.report_end(self.fixed.run_dir, loss, self.fixed.corpus)
        return EXIT_DONE


_RECORDED = ("loss", "grad_norm", "lr", "heads_clipped", "max_logit")


class _UndoneError(Exception):
    """A step after which the run goes back to a checkpoint."""

    def __init__(self, step: int, reason: Reason) -> None:
        super().__init__()
        self.step, self.reason = step, reason


class _NotFiniteError(Exception):
    """A step whose update was withheld."""

    def __init__(self, pending: _Pending) -> None:
        super().__init__()
        self.pending = pending


def _due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0
