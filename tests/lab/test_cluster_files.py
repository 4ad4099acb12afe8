"""The SkyPilot files: their keys, variables and extras.

`.ci/run sky` loads the files by `sky.Task.from_yaml`. The tests lack SkyPilot, so the keys that it
accepts are listed here, as far as the files may use them.
"""

import shlex
import tomllib

import pytest
from command import ROOT

yaml = pytest.importorskip("yaml", reason="needs yaml")

FILES = sorted((ROOT / "configs" / "cluster").glob("*.yaml"))
KEYS = {
    "": {"name", "resources", "envs", "workdir", "file_mounts", "setup", "run"},
    "resources": {
        "infra", "accelerators", "accelerator_args", "cpus", "memory", "use_spot", "job_recovery",
    },
    "accelerator_args": {"runtime_version", "tpu_name", "tpu_vm"},
    "job_recovery": {"strategy", "max_restarts_on_errors"},
}  # fmt: skip


def unknown(value, section=""):
    """Yields the unknown keys, with their sections."""
    for key, below in value.items():
        if key not in KEYS[section]:
            yield f"{section}.{key}"
        if key in KEYS:
            yield from unknown(below, key)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_keys_are_those_of_skypilot(path):
    task = yaml.safe_load(path.read_text())
    assert list(unknown(task)) == []
    for mount in task["file_mounts"].values():
        assert set(mount) == {"name", "store", "mode"}
        assert mount["mode"] in ("MOUNT", "MOUNT_CACHED", "COPY")
    task["resources"]["acelerators"] = task["resources"].pop("accelerators")
    assert list(unknown(task)) == ["resources.acelerators"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_variables_are_declared_and_extras_exist(path):
    task = yaml.safe_load(path.read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extras,) = (word for word in shlex.split(task["setup"]) if word.startswith(".["))
    assert set(extras[2:-1].split(",")) <= set(project["optional-dependencies"])
    for name in set(_variables(task["run"])):
        assert name in task["envs"]


def _variables(text):
    return (part.split("/")[0].split('"')[0].split()[0] for part in text.split("$")[1:])


def test_there_are_a_sweep_and_a_slice():
    assert [path.stem for path in FILES] == ["gpu_sweep", "tpu_slice"]
    sweep, one = (yaml.safe_load(path.read_text())["run"] for path in FILES)
    assert sweep.startswith("lowprec-attn lab run ") and one.startswith("lowprec-attn train ")
