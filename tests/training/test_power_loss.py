"""A machine loses power during training: the same command goes on and writes the same records."""

import contextlib
import hashlib
import os

import pytest
from processes.instants import Disk, as_synced, half_of_the_rest, snapshots_of, zeros_for_the_rest
from tiny import tiny_config

from lowprec_attn.training.config import train_settings
from lowprec_attn.training.loop import EXIT_DONE
from lowprec_attn.training.run import train

pytestmark = pytest.mark.usefixtures("compiled_once", "no_report")

RECORDS = ("config.json", "metrics.jsonl", "data_order.txt", "summary.json")
IMAGES = {
    "what is synced": (lambda path, synced, now: synced, as_synced),
    "all names": (lambda path, synced, now: now, as_synced),
    "half of each file": (lambda path, synced, now: now, half_of_the_rest),
    "zeros": (lambda path, synced, now: now, zeros_for_the_rest),
}


def run(workdir, text):
    fields = {"data__path": str(text), "model__layers": 1, "devices": 1, "steps": 4}
    fields |= {"attention__implementation": "tiled", "diagnostics_every": 0, "eval_every": 0}
    config = tiny_config(**fields, checkpoints_kept=1)
    return train(train_settings(config), config, workdir)


def digest(directory):
    """A digest of an image, without the files that differ between two starts."""
    found = hashlib.sha256()
    for path in sorted(directory.rglob("*")):
        if "tensorboard" not in path.parts and path.name != "environment.json":
            content = path.read_bytes() if path.is_file() else b""
            found.update(repr((str(path.relative_to(directory)), content)).encode())
    return found.digest()


@pytest.fixture(scope="module")
def whole(tmp_path_factory, text):
    """The records of an undisturbed run."""
    workdir = tmp_path_factory.mktemp("runs") / "whole"
    assert run(workdir, text) == EXIT_DONE
    return {name: (workdir / name).read_bytes() for name in RECORDS}


@pytest.mark.parametrize("at_most", [3, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", IMAGES)
def test_a_run_goes_on_after_a_loss_of_power(tmp_path, monkeypatch, text, whole, kind, at_most):
    """Resumes up to `at_most` images of the directory, evenly spaced and including the last."""
    cut = tmp_path / "cut"
    cut.mkdir()
    with contextlib.closing(Disk(cut)) as disk:
        monkeypatch.setattr(os, "fsync", disk.fsync)
        copies = snapshots_of(
            monkeypatch,
            cut,
            tmp_path,
            lambda: run(cut, text),
            lambda target: disk.image(target, *IMAGES[kind]),
        )
        monkeypatch.undo()
    images = list({digest(copy): copy for copy in copies if copy.exists()}.values())
    assert len(images) > 10
    for image in images[:: -max(len(images) // at_most, 1)]:
        assert run(image, text) == EXIT_DONE
        assert {name: (image / name).read_bytes() for name in RECORDS} == whole
