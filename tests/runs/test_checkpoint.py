"""Checkpoints: what is restored, which damage is noticed, and that no kill loses one."""

import contextlib
import errno
import functools
import json
import os
import random
import re
import resource
import shutil
import signal
import threading
import time
from collections import namedtuple
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from processes.forks import Fork
from processes.instants import Disk, snapshots_of

from lowprec_attn.runs import checkpoint_content
from lowprec_attn.runs.checkpoint import CheckpointError, Checkpoints
from lowprec_attn.runs.manifest import Manifest

Moments = namedtuple("Moments", ["mu", "nu"])
ROOT = Path(__file__).resolve().parents[2]


def make_state(step):
    """A state in which each array tells the step, with values that are easily lost."""
    return {
        "params": {
            "w": jnp.full((4, 8), step, jnp.float32)
            .at[0, :3]
            .set(jnp.array([-0.0, 1e-42, jnp.nan])),
            "scale": jnp.full((3,), step + 0.5, jnp.bfloat16),
        },
        "optimizer": (Moments(jnp.full((2,), 1 / (step + 3)), np.float32(step)), ()),
        "step": jnp.int32(step),
        "key": jax.random.key_data(jax.random.key(step)),
    }


def make_data_state(step):
    return {"next": step, "order": [step, {"seed": None}]}


def assert_same_bits(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


def save(directory, *steps, keep=2):
    with Checkpoints(directory, keep) as checkpoints:
        for step in steps:
            checkpoints.save(step, make_state(step), make_data_state(step))


def restore(directory):
    """Restores, checks that every value belongs to the step, and returns the step or None."""
    with Checkpoints(directory) as checkpoints:
        restored = checkpoints.restore(make_state(0))
    if restored is None:
        return None
    assert_same_bits(restored.state, make_state(restored.step))
    assert restored.data_state == make_data_state(restored.step)
    return restored.step


def files_of(directory, step):
    content = directory / json.loads((directory / f"{step:08d}.json").read_bytes())["content"]
    return sorted(path for path in content.rglob("*") if path.is_file() and path.stat().st_size)


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def one_line(error):
    text = str(error.value)
    assert "\n" not in text
    return text


# What is restored.


def test_what_is_saved_comes_back_bit_for_bit(tmp_path):
    save(tmp_path, 7)
    assert restore(tmp_path) == 7


def test_what_was_measured_comes_back_where_there_is_any_and_it_is_asked_for(tmp_path):
    measured = {"layer_0": jnp.arange(3, dtype=jnp.float32), "layer_1": jnp.zeros((2, 2))}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(7, make_state(7), make_data_state(7), measured=measured)
        found = checkpoints.restore(make_state(0), target_measured=measured)
        assert_same_bits(found.measured, measured)
        assert_same_bits(found.state, make_state(7))
        assert checkpoints.restore(make_state(0)).measured is None
        with pytest.raises(CheckpointError, match="another model: layer_1 is float32"):
            checkpoints.restore(make_state(0), target_measured={"layer_0": measured["layer_0"]})
        checkpoints.save(8, make_state(8), make_data_state(8))  # as an earlier version did
        found = checkpoints.restore(make_state(0), target_measured=measured)
    assert (found.step, found.measured) == (8, None)
    assert [path.parent.name for path in sorted(tmp_path.glob("*/measured"))] == ["00000007-0"]


@pytest.mark.parametrize(("last_step", "step"), [(None, 9), (9, 9), (8, 7), (6, None)])
def test_checkpoints_after_the_last_step_wanted_are_left_alone(tmp_path, last_step, step):
    save(tmp_path, 7, 9)
    before = names(tmp_path)
    with Checkpoints(tmp_path) as checkpoints:
        restored = checkpoints.restore(make_state(0), last_step)
    assert (restored and restored.step) == step
    assert names(tmp_path) == before


@pytest.mark.parametrize("directory", ["missing", "."])
def test_without_checkpoints_there_is_nothing_to_restore(tmp_path, directory):
    assert restore(tmp_path / directory) is None
    assert names(tmp_path) == []


def test_arrays_come_back_as_the_kind_and_with_the_sharding_of_the_target(tmp_path):
    mesh = Mesh(np.array(jax.devices()), ("data",))
    split = NamedSharding(mesh, PartitionSpec("data"))
    whole = NamedSharding(mesh, PartitionSpec())
    values = np.arange(16, dtype=np.float32)
    with Checkpoints(tmp_path) as checkpoints:
        state = {
            "a": jax.device_put(values, whole),
            "b": jax.device_put(values, split),
            "c": values,
        }
        checkpoints.save(1, state, {})
        target = {
            "a": jax.ShapeDtypeStruct((16,), jnp.float32, sharding=split),
            "b": jax.device_put(values, whole),
            "c": np.zeros(16, np.float32),
        }
        restored = checkpoints.restore(target).state
    assert restored["a"].sharding == split
    assert restored["b"].sharding == whole
    assert isinstance(restored["c"], np.ndarray)
    for leaf in restored.values():
        np.testing.assert_array_equal(leaf, values)


def test_the_state_may_be_donated_and_changed_as_soon_as_save_returns(tmp_path):
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    # Large enough that the next steps could overwrite a view of the buffer while it is read.
    state, host, data_state = jnp.zeros(1 << 20), np.zeros(4), {"next": [0]}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, {"x": state, "host": host}, data_state)
        for _ in range(5):
            state = step(state)
        host[:] = 5
        data_state["next"][0] = 5
        restored = checkpoints.restore({"x": state, "host": host})
    assert not restored.state["x"].any()
    assert not restored.state["host"].any()
    assert restored.data_state == {"next": [0]}


def test_saving_goes_on_in_the_background(tmp_path, monkeypatch):
    may_write = threading.Event()
    begin = checkpoint_content.begin
    monkeypatch.setattr(
        checkpoint_content, "begin", lambda *args: may_write.wait() and begin(*args)
    )
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, make_state(3), make_data_state(3))
        assert not list(tmp_path.glob("*.json"))
        may_write.set()
        checkpoints.wait()
        assert names(tmp_path) == ["00000003-0", "00000003.json"]


# What is kept.


@pytest.mark.parametrize(("keep", "left"), [(1, [9]), (2, [5, 9]), (9, [1, 3, 5, 9])])
def test_the_newest_are_kept(tmp_path, keep, left):
    save(tmp_path, 1, 3, 5, 9, keep=keep)
    assert names(tmp_path) == sorted(f"{s:08d}{end}" for s in left for end in (".json", "-0"))


def test_keeping_none_is_refused(tmp_path):
    with pytest.raises(ValueError, match="keep=0"):
        Checkpoints(tmp_path, keep=0)


def test_leftovers_of_a_killed_save_are_removed_and_nothing_else(tmp_path):
    save(tmp_path, 1)
    for leftover in ("00000000-0", "00000001-1", "00000002-0.orbax-checkpoint-tmp", "00000002-0"):
        (tmp_path / leftover / "state").mkdir(parents=True)
        (tmp_path / leftover / "state" / "file").write_text("half")
    (tmp_path / "00000002.json.tmp").write_text("{")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "plots").mkdir()
    save(tmp_path, 2)
    complete = ["00000001-0", "00000001.json", "00000002-0", "00000002.json"]
    assert names(tmp_path) == [*complete, "notes.txt", "plots"]
    assert restore(tmp_path) == 2


# Damage.


def flip_bit(path, position=0.5, bit=3):
    data = bytearray(path.read_bytes())
    data[int(position * len(data))] ^= 1 << bit
    path.write_bytes(data)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def directory_instead(path):
    path.unlink()
    path.mkdir()


def loop_instead(path):
    path.unlink()
    path.symlink_to(path.name)


DAMAGES = {
    "a directory": (directory_instead, r"cannot be read \(Is a directory\)"),
    "a circle of links": (loop_instead, r"(leads out of .*|cannot be read \(Too many levels.*)"),
    "flipped bit": (flip_bit, "differs from its SHA-256"),
    "truncated": (truncate, r"has \d+ bytes instead of \d+"),
    "emptied": (lambda path: path.write_bytes(b""), r"has 0 bytes instead of \d+"),
    "missing file": (Path.unlink, "is missing"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_skipped_with_one_line(tmp_path, caplog, damage):
    inflict, words = DAMAGES[damage]
    save(tmp_path, 10, 20)
    for path in files_of(tmp_path, 20):
        original = path.read_bytes()
        inflict(path)
        caplog.clear()
        assert restore(tmp_path) == 10
        (line,) = [record.getMessage() for record in caplog.records]
        name = re.escape(str(path.relative_to(tmp_path)))
        assert re.search(rf"checkpoint 20 .*{name} {words}; using checkpoint 10 instead", line)
        if path.is_symlink():
            path.unlink()
        elif path.is_dir():
            path.rmdir()
        path.write_bytes(original)
    assert restore(tmp_path) == 20


def manifest(content="00000020-0", files=None, size=1, sha256="0" * 64, name="data"):
    files = {name: {"size": size, "sha256": sha256}} if files is None else files
    return json.dumps({"content": content, "files": files}).encode()


NO_MANIFESTS = [
    *(b"", b"{}", b"[]", b'{"files": [], "content": 1}', b"\xff", b"[" * 100_000),
    *(manifest(content=content) for content in (None, "", ".", "..", "00000010-0", "/etc")),
    *(manifest(files=files) for files in ({}, {"data": None}, {"data": {"size": 1}})),
    *(manifest(size=size) for size in (None, "1", True)),
    *(manifest(sha256=digest) for digest in (None, "", 0)),
]


def test_a_damaged_manifest_is_skipped_and_its_content_left_alone(tmp_path, caplog):
    save(tmp_path, 10, 20)
    for damaged in NO_MANIFESTS:
        (tmp_path / "00000020.json").write_bytes(damaged)
        caplog.clear()
        assert restore(tmp_path) == 10, damaged
        told = "00000020.json is not a manifest; using checkpoint 10 instead"
        assert told in caplog.text, damaged
    save(tmp_path, 15)
    assert "00000020-0" in names(tmp_path)


def test_no_file_outside_of_the_content_is_opened(tmp_path, caplog):
    save(tmp_path, 10, 20)
    for name in ("../../secret", "/etc/passwd", "state/../../x", "", ".", "x\0"):
        (tmp_path / "00000020.json").write_bytes(manifest(name=name))
        caplog.clear()
        assert restore(tmp_path) == 10, name
        told = f"00000020.json names a file outside of its content: {name!r}; using"
        assert told in caplog.text, name


def test_no_link_out_of_the_content_is_followed(tmp_path, caplog):
    save(tmp_path / "run", 10, 20)
    file = files_of(tmp_path / "run", 20)[0]
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert restore(tmp_path / "run") == 10
    assert f"leads out of {tmp_path / 'run'}; using checkpoint 10 instead" in caplog.text


@pytest.mark.parametrize("inflict", [directory_instead, loop_instead])
def test_a_manifest_that_is_no_file_is_skipped_and_replaced(tmp_path, caplog, inflict):
    save(tmp_path, 10, 20)
    inflict(tmp_path / "00000020.json")
    assert restore(tmp_path) == 10
    assert "using checkpoint 10 instead" in caplog.text
    save(tmp_path, 20)
    assert restore(tmp_path) == 20
    inflict(tmp_path / "00000020.json")
    save(tmp_path, 30, keep=1)
    assert names(tmp_path) == ["00000030-0", "00000030.json"]


def test_files_in_the_place_of_directories_are_skipped_and_removed(tmp_path):
    save(tmp_path, 10, 20)
    shutil.rmtree(tmp_path / "00000020-0")
    (tmp_path / "00000020-0").touch()
    (tmp_path / "00000025.json.tmp").mkdir()
    (tmp_path / "00000025-0").touch()
    assert restore(tmp_path) == 10
    save(tmp_path, 30, keep=1)
    assert names(tmp_path) == ["00000030-0", "00000030.json"]


def test_a_negative_step_is_refused(tmp_path):
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(ValueError, match="step=-1"):
        checkpoints.save(-1, make_state(0), {})
    assert names(tmp_path) == []


def test_a_missing_content_directory_is_skipped(tmp_path, caplog):
    save(tmp_path, 10, 20)
    shutil.rmtree(tmp_path / "00000020-0")
    assert restore(tmp_path) == 10
    assert "is missing; using checkpoint 10 instead" in caplog.text


def test_no_flipped_bit_is_ever_loaded(tmp_path):
    save(tmp_path, 10, 20)
    rng = random.Random(0)
    targets = [*files_of(tmp_path, 20), tmp_path / "00000020.json"]
    for path in targets * 3:
        original = path.read_bytes()
        flip_bit(path, rng.random(), rng.randrange(8))
        assert restore(tmp_path) in (10, 20)  # 20 after white space of the manifest changed
        path.write_bytes(original)


def test_several_damaged_ones_are_all_named(tmp_path, caplog):
    save(tmp_path, 1, 2, 3, keep=3)
    for step in (2, 3):
        truncate(files_of(tmp_path, step)[0])
    assert restore(tmp_path) == 1
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split(" in ")[0] for line in lines] == [
        "skipping checkpoint 3",
        "skipping checkpoint 2",
    ]
    assert all(line.endswith("using checkpoint 1 instead") for line in lines)


def test_no_intact_checkpoint_is_an_error(tmp_path):
    save(tmp_path, 1, 2)
    for step in (1, 2):
        flip_bit(files_of(tmp_path, step)[0])
    with pytest.raises(CheckpointError) as error:
        restore(tmp_path)
    text = one_line(error)
    assert f"no checkpoint in {tmp_path} is intact" in text
    # Without its checkpoints the run would be refused, because it has records.
    assert text.endswith(
        "restore the directory from a copy, or start anew in another run directory"
    )
    assert "checkpoint 2: 00000002-0/" in text and "checkpoint 1: 00000001-0/" in text


def test_a_first_save_that_was_killed_is_no_error(tmp_path, caplog):
    save(tmp_path, 1)
    (tmp_path / "00000001.json").unlink()
    assert restore(tmp_path) is None
    (line,) = [record.getMessage() for record in caplog.records]
    assert "00000001.json is missing: saving was not completed" in line
    save(tmp_path, 1)
    assert restore(tmp_path) == 1


def test_a_damaged_step_can_be_saved_again(tmp_path):
    save(tmp_path, 10, 20)
    flip_bit(files_of(tmp_path, 20)[0])
    assert restore(tmp_path) == 10
    save(tmp_path, 20)
    assert restore(tmp_path) == 20
    assert names(tmp_path) == ["00000010-0", "00000010.json", "00000020-1", "00000020.json"]


def test_damaged_checkpoints_do_not_push_out_intact_ones(tmp_path):
    save(tmp_path, 10, 20)
    flip_bit(files_of(tmp_path, 20)[0])
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.restore(make_state(0)).step == 10
        checkpoints.save(15, make_state(15), make_data_state(15))
        checkpoints.wait()
        assert {path.name for path in tmp_path.glob("*.json")} == {
            "00000010.json",
            "00000015.json",
            "00000020.json",
        }
        checkpoints.save(25, make_state(25), make_data_state(25))
    assert names(tmp_path) == ["00000015-0", "00000015.json", "00000025-0", "00000025.json"]


# Other models.


def other_shape(state):
    state["params"]["w"] = jnp.zeros((4, 9))


def other_dtype(state):
    state["params"]["scale"] = jnp.zeros(3, jnp.float16)


def one_less(state):
    del state["key"]


def one_more(state):
    state["params"]["bias"] = jnp.zeros(2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (other_shape, "params/w is float32[4, 8] in the checkpoint and float32[4, 9] here"),
        (other_dtype, "params/scale is bfloat16[3] in the checkpoint and float16[3] here"),
        (one_less, "key is uint32[2] in the checkpoint and absent here"),
        (one_more, "params/bias is absent in the checkpoint and float32[2] here"),
    ],
)
def test_another_model_is_refused_with_the_first_difference(tmp_path, change, words):
    save(tmp_path, 4)
    target = make_state(0)
    change(target)
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(CheckpointError) as error:
        checkpoints.restore(target)
    assert words in one_line(error)
    assert restore(tmp_path) == 4


def test_paths_that_collide_are_refused(tmp_path):
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(ValueError, match="same path"):
        checkpoints.save(0, {"a": {"b": jnp.zeros(1)}, "a/b": jnp.zeros(1)}, {})


# Disks that refuse.


def fail(error_code, *_):
    raise OSError(error_code, os.strerror(error_code))


REFUSALS = {
    "full": (shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1 << 30, 1 << 30, 4096)),
    "quota": (checkpoint_content, "begin", functools.partial(fail, errno.EDQUOT)),
    "broken": (Manifest, "of", functools.partial(fail, errno.EIO)),
    "full at the end": (Manifest, "write", functools.partial(fail, errno.ENOSPC)),
    "read-only": (Path, "mkdir", functools.partial(fail, errno.EROFS)),
}


@pytest.mark.parametrize("refusal", REFUSALS)
@pytest.mark.parametrize("step", [2, 3])
def test_a_disk_that_refuses_is_told_in_one_line_and_nothing_is_lost(
    tmp_path, monkeypatch, refusal, step
):
    save(tmp_path, 1, 2)
    before = names(tmp_path)
    with Checkpoints(tmp_path) as checkpoints:
        with monkeypatch.context() as patch:
            patch.setattr(*REFUSALS[refusal])
            checkpoints.save(step, make_state(99), make_data_state(99))
            with pytest.raises(CheckpointError) as error:
                checkpoints.wait()
        text = one_line(error)
        assert text.startswith(f"cannot write checkpoint {step} to {tmp_path}: ")
        assert names(tmp_path) == before
        assert checkpoints.restore(make_state(0)).step == 2
        checkpoints.save(3, make_state(3), make_data_state(3))
    assert restore(tmp_path) == 3


def test_a_full_disk_is_told_with_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(*REFUSALS["full"])
    with pytest.raises(
        CheckpointError, match=r"No space left on device \([\d,]+ bytes needed, 4,096"
    ):
        save(tmp_path, 1)


def test_a_directory_that_cannot_be_made_is_told_in_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError) as error:
        save(tmp_path / "file" / "checkpoints", 1)
    assert "Not a directory" in one_line(error)


def limit_files():
    """Makes TensorStore stop in the middle of a file."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))


def refuse_directories():
    os.mkdir = functools.partial(fail, errno.EROFS)


def save_against_the_system(directory, obstacle):
    """In a child process, because errors inside Orbax print messages and leave threads behind."""
    state = {"x": np.random.default_rng(0).standard_normal((64, 1024))}
    with Checkpoints(directory) as checkpoints:
        checkpoints.save(1, state, {})
        checkpoints.wait()
        obstacle()
        checkpoints.save(2, state, {})
        try:
            checkpoints.wait()
        except CheckpointError as error:
            print(error)
        assert checkpoints.restore(state).step == 1


@pytest.mark.parametrize(
    ("obstacle", "words"),
    [(limit_files, "File too large"), (refuse_directories, "Read-only file system")],
)
def test_an_error_inside_of_orbax_is_told_in_one_line(tmp_path, obstacle, words):
    child = Fork(save_against_the_system, tmp_path, obstacle, environment=dict(os.environ))
    output, errors = child.communicate(timeout=60)
    assert child.returncode == 0, errors
    (line,) = output.splitlines()
    assert line.startswith(f"cannot write checkpoint 2 to {tmp_path}: {words}; ")
    assert names(tmp_path) == ["00000001-0", "00000001.json"]


# Kills.


@pytest.mark.parametrize("step", [1, 2])
def test_every_instant_of_a_save_leaves_a_checkpoint(tmp_path, monkeypatch, step):
    directory = tmp_path / "checkpoints"
    save(directory, 1)
    (directory / "00000003-0.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    (directory / "00000003-0.orbax-checkpoint-tmp" / "state" / "file").write_text("half")
    copies = snapshots_of(monkeypatch, directory, tmp_path, lambda: save(directory, step, keep=1))
    steps = [restore(copy) for copy in copies]
    assert steps[0] == 1 and steps[-1] == step
    assert steps == sorted(steps)
    assert len(steps) > 30
    for copy in copies[::7]:
        save(copy, 5, keep=1)
        assert names(copy) == ["00000005-0", "00000005.json"]


def test_a_loss_of_power_at_any_instant_leaves_a_checkpoint(tmp_path, monkeypatch):
    directory = tmp_path / "checkpoints"
    save(directory, 1)
    reached = {
        "nothing": lambda path, synced, now: synced,
        "all": lambda path, synced, now: now,
        "below nothing": lambda path, synced, now: now if path == directory else synced,
        "manifests": lambda path, synced, now: synced | {n: now[n] for n in now if "json" in n},
    }
    with contextlib.closing(Disk(directory)) as disk:
        monkeypatch.setattr(os, "fsync", disk.fsync)

        def images(target):
            target.mkdir()
            for name, names in reached.items():
                disk.image(target / name, names)

        copies = snapshots_of(
            monkeypatch, directory, tmp_path, lambda: save(directory, 2, keep=1), images
        )
    seen = {}
    for copy in copies:
        for name in reached:
            paths = sorted((copy / name).rglob("*"))
            found = tuple(
                (str(p)[len(str(copy / name)) :], p.is_file() and p.read_bytes()) for p in paths
            )
            if found not in seen:
                seen[found] = restore(copy / name)
    assert set(seen.values()) == {1, 2}
    assert restore(copies[-1] / "nothing") == 2  # a completed save is on the disk


def save_for_ever(directory):
    """In a child process: restores, then saves every step until it is killed."""
    with Checkpoints(directory) as checkpoints:
        restored = checkpoints.restore(make_state(0))
        step = 0 if restored is None else restored.step
        print(f"restored {step}", flush=True)
        while True:
            step += 1
            checkpoints.save(step, make_state(step), make_data_state(step))
            checkpoints.wait()
            print(f"saved {step}", flush=True)


def test_sigkill_loses_no_checkpoint(tmp_path):
    rng = random.Random(0)
    complete = 0
    for _ in range(3):
        child = Fork(save_for_ever, tmp_path, environment=dict(os.environ))
        child.wait_for_lines(rng.randrange(1, 6))
        time.sleep(rng.random() * 0.1)
        child.send_signal(signal.SIGKILL)
        output, errors = child.communicate(timeout=60)
        assert child.returncode == -signal.SIGKILL, errors
        lines = [line for line in output.splitlines(keepends=True) if line.endswith("\n")]
        assert lines[0] in (f"restored {complete}\n", f"restored {complete + 1}\n")
        complete = int(lines[-1].split()[1])
        assert (restore(tmp_path) or 0) in (complete, complete + 1)
    assert complete > 3


@pytest.mark.parametrize("name", [b"lr=[1e-3]", b"[!a]", b"a\\b", b"caf\xe9"])
def test_a_path_under_which_arrays_would_get_lost_is_refused(tmp_path, name):
    place = tmp_path / os.fsdecode(name)
    with pytest.raises(CheckpointError, match="choose another place, without such names"):
        save(place / "run", 1)
    assert not place.exists()


@pytest.mark.parametrize("name", ["a[1", "lr*{1,2}?", "größe 漢字 $HOME", "a#%20&b"])
def test_a_path_with_other_signs_is_taken(tmp_path, name):
    save(tmp_path / name, 1)
    assert restore(tmp_path / name) == 1
