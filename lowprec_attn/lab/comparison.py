"""Checks whether arms may be compared: they may differ only in their overrides."""

import itertools
from collections.abc import Sequence
from typing import Any

from lowprec_attn.files import complete_lines
from lowprec_attn.lab.workdir import ArmRun
from lowprec_attn.runs.earlier import section_of
from lowprec_attn.runs.instability import rollbacks
from lowprec_attn.runs.run_dir import RunDir

_SAME = ("versions", "backend", "device_kind", "device_count", "commit")


def unwanted_differences(runs: Sequence[ArmRun]) -> list[str]:
    """Returns the differences between started arms other than their overrides, one sentence each.

    Every run is compared with the first one in all fields of the config, and every start of a run
    with the first start in package versions, backend, kind and number of devices, and source
    commit. The text's SHA-256 is a field of the config, and may differ if an arm overrides
    `data.path`. The seed may differ between runs that set seeds.

    Every run is also compared with the first run of the same seed in the batches of the steps that
    both have taken, up to the first step to which either went back
    (`runs.instability.rollbacks`), because from there it leaves batches out.
    """
    found = []
    for first, run in itertools.product(runs[:1], runs[1:]):
        texts = _config_differences(first, run)
        found += [f"{first.name} and {run.name} differ in {text}" for text in texts]
    of_seed: dict[int | None, ArmRun] = {}
    for run in runs:
        first = of_seed.setdefault(run.trial.seed, run)
        if not _same_batches(first.run_dir, run.run_dir):
            pair = f"{first.name} and {run.name}"
            found.append(f"{pair} were not given the same batches (data_order.txt)")
    environments = [(run.name, start) for run in runs for start in run.run_dir.starts()]
    for name in _SAME:
        found += _environment_differences(name, environments)
    return found


def _config_differences(a: ArmRun, b: ArmRun) -> list[str]:
    overridden = [section_of(name) for run in (a, b) for name in run.trial.arm.overrides]
    if None not in (a.trial.seed, b.trial.seed):
        overridden.append("seed")
    if "data.path" in overridden:
        overridden.append("text_sha256")
    return [
        f"config.{field}: {theirs} and {ours}"
        for field, (theirs, ours) in b.run_dir.changes_from(a.run_dir).items()
        if not any(field == name or field.startswith(f"{name}.") for name in overridden)
    ]


def _same_batches(a: RunDir, b: RunDir) -> bool:
    """Whether the shorter record of batches is a prefix of the longer one.

    Unterminated lines do not count, nor do steps after the first one to which either run went back.
    """
    end = min((r.to for run in (a, b) for r in rollbacks.read(run.rollbacks)), default=None)
    records = (complete_lines(run.data_order) if run.data_order.exists() else [] for run in (a, b))
    shorter, longer = sorted((lines[:end] for lines in records), key=len)
    return longer[: len(shorter)] == shorter


def _environment_differences(name: str, starts: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
    """Returns a sentence on the first start that differs from the very first one, or nothing."""
    for arm, start in starts:
        first_arm, first = starts[0]
        ours, theirs = start.get(name), first.get(name)
        if ours != theirs:
            return [f"{name} differs: {theirs} ({first_arm}), {ours} ({arm})"]
    return []
