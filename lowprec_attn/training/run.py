"""Assembles a training run from its settings; `train.py` calls it after reading the config.

A run directory holds config, environment, data order, metrics, checkpoints and the report.
"""

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import optax

from lowprec_attn import hosts
from lowprec_attn.data import builtin_text, lookup_text, tokens
from lowprec_attn.data.batches import require_windows, train_iterator
from lowprec_attn.data.order import Order, OrderRecord, SeededOrder, skipping
from lowprec_attn.errors import RunError
from lowprec_attn.files import Fingerprint, read_record, write_atomically
from lowprec_attn.runs.checkpoint import Checkpoints, Restored, require_storable
from lowprec_attn.runs.history import load_config
from lowprec_attn.runs.instability import rollbacks
from lowprec_attn.runs.instability.rollbacks import Rollback, RollbackRecord, skipped
from lowprec_attn.runs.metrics import MetricsWriter
from lowprec_attn.runs.run_dir import RunDir
from lowprec_attn.tables import columns
from lowprec_attn.training.across_steps import direction_shapes
from lowprec_attn.training.announcement import announce, arithmetic
from lowprec_attn.training.devices import Devices, make_program, run_devices
from lowprec_attn.training.instability.rescue import Rescue
from lowprec_attn.training.loop import EXIT_DONE, Loop, Run
from lowprec_attn.training.optimizer import moved, with_layout
from lowprec_attn.training.resources import heap
from lowprec_attn.training.resources.memory import explained_shortage, require_memory
from lowprec_attn.training.settings import DataSettings, TrainSettings
from lowprec_attn.training.step import root_key


def train(settings: TrainSettings, config: Mapping[str, Any], workdir: Path) -> int:
    """Trains, or continues what an interrupted run left in `workdir`.

    Args:
      settings: settings of the run.
      config: the mapping that they were made from; it is written into the run directory.
      workdir: the run directory.

    Returns:
      An exit code: 0 when done or stopped by SIGTERM, 130 when stopped by SIGINT; 3 when a loss was
        not finite, or has exploded and `stop_exploded_after` says to stop.

    Raises:
      UserError: data, checkpoint or run directory cannot be used; the message is one line.
    """
    devices = run_devices(settings)
    require_memory(settings, devices)
    corpus = open_corpus(settings.data)
    context = settings.model.context
    corpus.require(context=context, vocab_size=settings.model.vocab_size)
    require_windows(corpus.val, context, settings.batch_size, settings.eval_batches)
    draw = SeededOrder(settings.seed, settings.batch_size, corpus.train.count, context)
    # The text is part of what defines a run: the built-in one differs between Python versions.
    identity = {"train": corpus.train.sha256, "val": corpus.val.sha256}
    config = {**config, "text_sha256": identity}
    _require_one_run(config, workdir)
    require_storable(RunDir(workdir).checkpoints)  # before anything is made there
    with (
        heap.rarely_collected(),
        hosts.ending_together(),
        RunDir.open(workdir, config) as run_dir,
        Checkpoints(run_dir.checkpoints, settings.checkpoints_kept) as checkpoints,
        explained_shortage(devices),
    ):
        announce(settings, corpus, devices, run_dir.path)
        if settings.optimizer.warmup_steps >= settings.steps:
            hosts.say(
                f"note: warmup_steps {settings.optimizer.warmup_steps} is not below steps "
                f"{settings.steps}: the learning rate never reaches its peak"
            )
        parts = settings, devices, corpus, draw, run_dir, checkpoints
        while (code := _run_once(*parts)) is None:
            heap.release()  # the loop that went back is a reference cycle with a whole state
        return code


def _run_once(
    settings: TrainSettings,
    devices: Devices,
    corpus: tokens.Corpus,
    draw: Order,
    run_dir: RunDir,
    checkpoints: Checkpoints,
) -> int | None:
    """Runs from the newest checkpoint to the end; returns None if the run goes back instead."""
    record = RollbackRecord(run_dir)
    if not checkpoints.steps():  # asked before any removal: the rest of one may be repairable
        hosts.from_first(run_dir.require_no_checkpoint_lost)
    checkpoints.discard(record.abandoned)
    restored, is_own = _restore(settings, devices, run_dir, checkpoints)
    start = 0 if restored is None else restored.step
    if is_own and start == settings.steps and hosts.from_first(lambda: _has_ended(run_dir)):
        checkpoints.prune()
        _say_finished(settings, run_dir)
        return EXIT_DONE
    record.keep_until(start)
    settings = _after(record.rollbacks, settings)
    data = train_iterator(
        corpus.train,
        settings.model.context,
        skipping(draw, hosts.from_first(lambda: _left_out(run_dir)) + skipped(record.rollbacks)),
        shard=devices.shard,
        parts=settings.accumulation_steps,
    )
    program = make_program(settings, devices)
    if restored is None:
        state = program.initial_state(root_key(settings))
    else:
        state = restored.state
        data.set_state(restored.data_state)
    order = OrderRecord(run_dir.data_order)
    order.truncate(start)
    rescue = Rescue(settings, run_dir, checkpoints, record)
    with MetricsWriter(run_dir, start) as metrics:
        run = Run(settings, devices, program, corpus, run_dir, checkpoints, metrics, order, rescue)
        saved_step, directions = None, None
        if restored is not None and is_own:
            saved_step, directions = start, restored.measured
        return Loop(run, state, data, saved_step, directions).run()


def _has_ended(run_dir: RunDir) -> bool:
    """Whether the run has taken its last step and has written everything that follows it."""
    if run_dir.failure.exists() or not run_dir.summary.exists():
        return False
    summary = read_record(run_dir.summary, val_loss=float)
    return bool(summary.get("complete", True))  # earlier versions did not say


@hosts.first_only
def _say_finished(settings: TrainSettings, run_dir: RunDir) -> None:
    loss = read_record(run_dir.summary, val_loss=float)["val_loss"]
    done = "the one step is" if settings.steps == 1 else f"all {settings.steps:,} steps are"
    print(
        f"finished: {done} done, validation loss {loss:.3f}; to train "
        f"on, set --config.resume_from={run_dir.path}, more --config.steps and another --workdir"
    )


def _after(rollbacks: Sequence[Rollback], settings: TrainSettings) -> TrainSettings:
    """Returns the settings after these rollbacks, and prints the last one."""
    if not rollbacks:
        return settings
    hosts.say(f"rollback {len(rollbacks)}: {rollbacks[-1]}")
    if settings.rollback is None or settings.rollback.attention is None:
        return settings
    settings = dataclasses.replace(settings, attention=settings.rollback.attention)
    hosts.say(columns([("attention", line) for line in arithmetic(settings)], "<<"))
    return settings


def open_corpus(settings: DataSettings) -> tokens.Corpus:
    """The text of a run: token files, or a built-in one."""
    if settings.path is not None:
        return tokens.load(settings.path)
    return lookup_text.load() if settings.builtin == "lookup" else builtin_text.load()


def _restore(
    settings: TrainSettings, devices: Devices, run_dir: RunDir, checkpoints: Checkpoints
) -> tuple[Restored | None, bool]:
    """Returns the newest intact checkpoint, and whether it is this run's own.

    If this run has none, the checkpoint comes from `resume_from`. It is None if there is none.
    """
    target = make_program(settings, devices).state
    directions = direction_shapes(settings.model, devices)
    restored = checkpoints.restore(target, target_measured=directions)
    if restored is not None:
        step, records = restored.step, restored.records
        hosts.from_first(lambda: run_dir.require_records(step, records))
        hosts.say(f"resuming at step {restored.step}")
        return restored, True
    if settings.resume_from is not None:
        return _restore_other(settings, devices, run_dir, target.opt_state), False
    return None, False


def _restore_other(
    settings: TrainSettings, devices: Devices, run_dir: RunDir, opt_state: optax.OptState
) -> Restored:
    """Returns a checkpoint of `resume_from`, copies its data order, and prints what changed.

    `opt_state` has the layout of this run's own optimizer state.
    """
    resume_from, last_step = settings.resume_from, settings.resume_step
    assert resume_from is not None
    source = RunDir(resume_from)
    if not source.config.exists():
        why = "it has no config.json" if source.path.exists() else "it does not exist"
        raise RunError(
            f"resume_from={resume_from} is not a run directory: {why}; give the --workdir of a run"
        )
    theirs = hosts.from_first(lambda: load_config(source.config).get("optimizer", {}))
    clips, decays = theirs.get("clip_norm") is not None, bool(theirs.get("weight_decay"))
    optimizer = with_layout(settings.optimizer, clips, decays)
    target = make_program(dataclasses.replace(settings, optimizer=optimizer), devices).state
    with Checkpoints(source.checkpoints) as checkpoints:
        restored = checkpoints.restore(target, last_step)
        steps = checkpoints.steps()
    if restored is None:
        when = "" if last_step is None else f" at or before resume_step={last_step}"
        others = f"; it holds those of steps {', '.join(map(str, steps))}" if steps else ""
        raise RunError(f"resume_from={resume_from} holds no complete checkpoint{when}{others}")
    if restored.step >= settings.steps:
        raise RunError(
            f"resume_from={resume_from} is at step {restored.step} and this run ends at step "
            f"{settings.steps}: set --config.steps above {restored.step}, and another --workdir if "
            "you gave one"
        )
    step, name = restored.step, source.data_order.name  # its metrics are not continued
    order = {name: restored.records[name]} if name in restored.records else {}
    hosts.from_first(lambda: source.require_records(step, order))
    _record_origin(source, run_dir, step, restored.records)
    state = restored.state._replace(opt_state=moved(restored.state.opt_state, opt_state))
    return dataclasses.replace(restored, state=state)


@hosts.first_only
def _record_origin(
    source: RunDir, run_dir: RunDir, step: int, records: Mapping[str, Fingerprint]
) -> None:
    try:
        with source.data_order.open("rb") as file:
            lines = list(itertools.islice(file, step))
    except OSError as error:
        raise RunError(
            f"resume_from={source.path}: cannot read its {source.data_order.name} "
            f"({error.strerror or error}); restore it from a copy"
        ) from error
    write_atomically(run_dir.data_order, b"".join(lines))
    changed = run_dir.changes_from(source)
    left_out = _left_out(source)
    went_back = rollbacks.read(source.rollbacks)
    if not rollbacks.undone(went_back, step, records):
        left_out += skipped([rollback for rollback in went_back if rollback.to <= step])
    origin = {"run": str(source.path), "step": step, "changed": changed, "left_out": left_out}
    run_dir.write_json(run_dir.origin, origin)
    listed = ", ".join(f"{name}: {a} -> {b}" for name, (a, b) in changed.items())
    print(f"from step {step} of {source.path}, changed: {listed or 'nothing'}")


def _left_out(run_dir: RunDir) -> int:
    """Returns how many batches the runs before had left out, that this one was resumed from."""
    if not run_dir.origin.exists():
        return 0
    record = {"left_out": 0} | read_record(run_dir.origin, step=int)  # earlier versions lack it
    if type(record["left_out"]) is not int or record["left_out"] < 0:
        raise RunError(
            f"{run_dir.origin} says left_out {record['left_out']!r}, which is no number of "
            "batches; restore it from a copy"
        )
    return record["left_out"]


def _require_one_run(config: Mapping[str, Any], workdir: Path) -> None:
    """Fails unless all processes were started for the same run."""
    described = json.dumps([config, str(workdir.absolute()), jax.__version__])
    digest = hashlib.sha256(described.encode()).hexdigest()
    hosts.require_everywhere(
        digest == hosts.from_first(lambda: digest),
        "has another config, text, --workdir or JAX than process 0; start all of them alike",
    )
