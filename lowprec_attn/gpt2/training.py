"""The training loop: what `train.py` runs after it has read the config.

A run directory holds config, environment, data order, metrics, checkpoints and the report. The
loop never waits for a step it has just dispatched: the metrics of step n are fetched when step
n + 1 is under way.
"""

import itertools
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grain
import jax
import jax.numpy as jnp
import numpy as np

from lowprec_attn.gpt2 import builtin_text, tokens
from lowprec_attn.gpt2.announcement import announce
from lowprec_attn.gpt2.checkpoint import Checkpoints, Restored
from lowprec_attn.gpt2.data import Batch, train_iterator, validation_batches
from lowprec_attn.gpt2.devices import Devices, local_devices
from lowprec_attn.gpt2.metrics import MetricsWriter
from lowprec_attn.gpt2.nonfinite import find_culprit
from lowprec_attn.gpt2.order import OrderRecord, Replay, SeededOrder
from lowprec_attn.gpt2.progress import Progress
from lowprec_attn.gpt2.report import write_report
from lowprec_attn.gpt2.run_dir import RunDir, write_atomically
from lowprec_attn.gpt2.settings import DataSettings, TrainSettings
from lowprec_attn.gpt2.signals import make_signals
from lowprec_attn.gpt2.step import StepMetrics, Steps, TrainState, make_steps, step_key

EXIT_DONE = 0
EXIT_NOT_FINITE = 3


class _Run(NamedTuple):
    """What stays the same from the first step to the last."""

    settings: TrainSettings
    devices: Devices
    steps: Steps
    corpus: tokens.Corpus
    run_dir: RunDir
    checkpoints: Checkpoints
    metrics: MetricsWriter
    order: OrderRecord


class _Pending(NamedTuple):
    """A dispatched step whose metrics have not been fetched."""

    batch: Batch
    arrays: tuple[jax.Array, jax.Array]
    data_state: dict[str, Any]  # before the batch was drawn
    metrics: StepMetrics


def train(settings: TrainSettings, config: Mapping[str, Any], workdir: Path) -> int:
    """Trains, or continues what an interrupted run left in `workdir`.

    Args:
      settings: the run.
      config: the mapping they were made from, written into the run directory.
      workdir: the run directory.

    Returns:
      An exit code: 0 when done or stopped by SIGTERM, 3 when a loss was not finite.

    Raises:
      ValueError, CheckpointError, RunDirError, MetricsError: data, checkpoint or run directory
        cannot serve; one clear line.
    """
    devices = local_devices(settings)
    corpus = open_corpus(settings.data)
    corpus.require(context=settings.model.context, vocab_size=settings.model.vocab_size)
    draw = _order(settings, corpus.train)
    # The text is part of what defines a run: the built-in one differs between Python versions.
    identity = {"train": corpus.train.sha256, "val": corpus.val.sha256}
    with RunDir.open(workdir, {**config, "text_sha256": identity}) as run_dir:
        steps = make_steps(settings, devices.attend)
        announce(settings, corpus, devices, run_dir.path)
        data = train_iterator(corpus.train, settings.model.context, draw)
        with Checkpoints(run_dir.checkpoints, keep=settings.checkpoints_kept) as checkpoints:
            state = _start(settings, devices, steps, run_dir, checkpoints, data)
            start = int(state.step)
            order = OrderRecord(run_dir.data_order)
            order.truncate(start)
            with MetricsWriter(run_dir, start) as metrics:
                run = _Run(settings, devices, steps, corpus, run_dir, checkpoints, metrics, order)
                return _Loop(run, state, data).run()


def open_corpus(settings: DataSettings) -> tokens.Corpus:
    """The text of a run: token files, or the built-in documentation."""
    return builtin_text.load() if settings.path is None else tokens.load(settings.path)


def _order(settings: TrainSettings, train_tokens: tokens.Tokens) -> SeededOrder | Replay:
    shape = (settings.batch_size, train_tokens.count, settings.model.context)
    if settings.data.replay is None:
        return SeededOrder(settings.seed, *shape)
    return Replay(settings.data.replay, *shape)


def _start(
    settings: TrainSettings,
    devices: Devices,
    steps: Steps,
    run_dir: RunDir,
    checkpoints: Checkpoints,
    data: grain.DatasetIterator,
) -> TrainState:
    """The newest intact checkpoint of this run, or of `resume_from`, or a fresh state."""
    fresh = jax.jit(steps.init, out_shardings=devices.replicated)
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=devices.replicated),
        jax.eval_shape(steps.init),
    )
    restored = checkpoints.restore(target)
    if restored is None and settings.resume_from is not None:
        restored = _restore_other(settings.resume_from, run_dir, target)
    if restored is None:
        return fresh()
    print(f"resuming at step {restored.step}")
    data.set_state(restored.data_state)
    return restored.state


def _restore_other(resume_from: str, run_dir: RunDir, target: Any) -> Restored:
    """The newest checkpoint of another run, with its data order up to there; says what changed."""
    source = RunDir(resume_from)
    if not source.config.exists():
        raise ValueError(f"resume_from={resume_from} is not a run directory: it has no config.json")
    with Checkpoints(source.checkpoints) as checkpoints:
        restored = checkpoints.restore(target)
    if restored is None:
        raise ValueError(f"resume_from={resume_from} holds no complete checkpoint")
    with source.data_order.open("rb") as file:
        lines = list(itertools.islice(file, restored.step))
    write_atomically(run_dir.data_order, b"".join(lines))
    changed = run_dir.changes_from(source)
    origin = {"run": str(source.path), "step": restored.step, "changed": changed}
    run_dir.write_json(run_dir.origin, origin)
    listed = ", ".join(f"{name}: {a} -> {b}" for name, (a, b) in changed.items())
    print(f"from step {restored.step} of {source.path}, changed: {listed or 'nothing'}")
    return restored


class _Loop:
    """A running loop: the live state, and the step whose metrics are still on the device."""

    def __init__(self, run: _Run, state: TrainState, data: grain.DatasetIterator) -> None:
        self.fixed, self.state, self.data = run, state, data
        self.train_step = run.devices.jit(run.steps.train, donate_argnums=0)
        self.evaluate = run.devices.jit(run.steps.evaluate)
        self.signals = run.devices.jit(make_signals(run.settings, run.steps))
        self.root = jax.random.key(run.settings.seed)
        self.pending: _Pending | None = None
        self.data_state = data.get_state()
        self.saved_step: int | None = None

    def run(self) -> int:
        """All remaining steps; returns the exit code."""
        settings, start = self.fixed.settings, int(self.state.step)
        with _stop_requests() as stop, Progress(settings, start) as self.progress:
            try:
                for step in range(start, settings.steps):
                    self._before(step)
                    self._dispatch(step)
                    if stop.is_set():
                        return self._stop_early(step + 1)
                self._fetch()
            except _NotFiniteError as stopped:
                return self._stop_not_finite(stopped.pending)
        self._save(settings.steps)
        return self._finish()

    def _before(self, step: int) -> None:
        """What is due before a step: it looks at the parameters that the step will change."""
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
        arrays = self.fixed.devices.put_train(batch)
        if _due(self.fixed.settings.diagnostics_every, step):
            self._fetch()
            self._write_signals(step, arrays)
        self.state, metrics = self.train_step(self.state, *arrays)
        dispatched = _Pending(batch, arrays, data_state, metrics)
        self._fetch()
        self.pending = dispatched

    def _fetch(self) -> None:
        """Waits for the pending step and records it.

        Raises:
          _NotFiniteError: its update was withheld.
        """
        if self.pending is None:
            return
        pending, self.pending = self.pending, None
        metrics = jax.device_get(pending.metrics)
        step = int(pending.batch["step"])
        self.fixed.order.append(step, pending.batch["starts"])
        self.fixed.metrics.write(step, {name: getattr(metrics, name) for name in _RECORDED})
        if not metrics.applied:
            raise _NotFiniteError(pending)
        seconds, tokens_done = self.progress.advance(float(metrics.loss))
        self.fixed.metrics.write_throughput(step, seconds, tokens_done)

    def _write_signals(self, step: int, arrays: tuple[jax.Array, jax.Array]) -> None:
        """Diagnostics of every layer and head on the first sequence of the step's batch."""
        inputs, targets = (x[0, :1] for x in arrays)
        key = step_key(self.root, jnp.int32(step))
        key = jax.random.fold_in(key, 0)  # as the first micro-batch has it
        signals = jax.device_get(self.signals(self.state.params, inputs, targets, key))
        self.fixed.metrics.write(step, {"signals": signals})

    def _write_validation(self, step: int) -> float:
        settings, run = self.fixed.settings, self.fixed
        batches = validation_batches(
            run.corpus.val, settings.model.context, settings.batch_size, settings.eval_batches
        )
        losses = [
            self.evaluate(self.state.params, *run.devices.put_eval(batch)) for batch in batches
        ]
        loss = float(np.mean(jax.device_get(losses), dtype=np.float64))
        run.metrics.write(step, {"val_loss": loss})
        return loss

    def _save(self, step: int) -> None:
        if self.saved_step != step:
            self.fixed.metrics.flush()  # a resumed run will not write these records again
            self.fixed.checkpoints.save(step, self.state, self.data_state)
            self.saved_step = step

    def _stop_early(self, step: int) -> int:
        """SIGTERM: the steps taken so far are kept."""
        self._fetch()
        self._save(step)
        print(f"stopped by SIGTERM after step {step}; the same command continues from there")
        return EXIT_DONE

    def _stop_not_finite(self, pending: _Pending) -> int:
        """The last good state is the live one: step n's update was withheld, n + 1's too."""
        step = int(pending.batch["step"])
        self.state = self.state._replace(failed=jnp.zeros_like(self.state.failed))
        self.data_state = pending.data_state
        self._save(step)
        culprit = find_culprit(
            self.fixed.settings,
            self.fixed.steps,
            self.state.params,
            pending.arrays,
            step_key(self.root, jnp.int32(step)),
        )
        self._write_signals(step, pending.arrays)
        run_dir = self.fixed.run_dir
        failure = {"step": step, **culprit._asdict(), "message": str(culprit)}
        run_dir.write_json(run_dir.failure, failure)
        write_report(run_dir)
        print(f"not finite at step {step}: {culprit}; the last good state is in {run_dir.path}")
        return EXIT_NOT_FINITE

    def _finish(self) -> int:
        loss = self._write_validation(self.fixed.settings.steps)
        unigram = tokens.unigram_loss(self.fixed.corpus.train, self.fixed.corpus.val)
        summary = {"val_loss": loss, "unigram_loss": unigram, "below_unigram": unigram - loss}
        run_dir = self.fixed.run_dir
        run_dir.write_json(run_dir.summary, summary)
        report = write_report(run_dir)
        print(
            f"validation loss {loss:.3f} nats per token, {unigram - loss:.3f} below the unigram "
            f"model's {unigram:.3f}; report: {report}"
        )
        return EXIT_DONE


_RECORDED = ("loss", "grad_norm", "lr")


class _NotFiniteError(Exception):
    """A step whose update was withheld."""

    def __init__(self, pending: _Pending) -> None:
        super().__init__()
        self.pending = pending


def _due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0


@contextmanager
def _stop_requests() -> Iterator[threading.Event]:
    """An event that SIGTERM sets, while the loop runs in the main thread."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    previous = signal.signal(signal.SIGTERM, lambda *_: stop.set())
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, previous)
