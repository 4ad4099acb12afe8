"""Config files and flags that cannot serve: one line that tells what is possible."""

import ast
import re

import pytest
from command import ROOT

from lowprec_attn.commands import config
from lowprec_attn.commands.config import ConfigFileError
from lowprec_attn.commands.main import main
from lowprec_attn.numerics import Numerics

BASE = "from configs.gpt2_bf16 import get_config as base\ndef get_config():\n"
FILES = {
    "syntax": ("def get_config(:", "invalid syntax"),
    "import": ("import nothing_of_this_name", "ModuleNotFoundError: No module named"),
    "no function": ("x = 1", "has no attribute 'get_config'"),
    "its own fault": ("def get_config():\n    return {}['a']", "KeyError: 'a'; --debug shows"),
    "another type": ("def get_config(): return 5", "get_config gives a int, no ConfigDict"),
    "not text": ("\0", "null bytes"),
}


@pytest.mark.parametrize("case", FILES)
def test_a_file_that_is_no_config(tmp_path, case):
    text, words = FILES[case]
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(ConfigFileError, match=rf"^{path} is not a config: .*{words}") as error:
        config.load(str(path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["nothing.py", "."])
def test_a_path_without_a_file_lists_the_configs(tmp_path, name):
    with pytest.raises(ConfigFileError, match=r"no config .*; pass a file, or .*gpt2_bf16"):
        config.load(str(tmp_path / name))


FLAGS = [
    ("optimizer.peek_lr=1", "unknown field config.optimizer.peek_lr (did you mean peak_lr?)"),
    ("stepz=1", "unknown field config.stepz (did you mean steps?); fields are accumulation_steps,"),
    ("attention.points.outptu=float32", "config.attention.points.outptu (did you mean output?)"),
    ("steps.x=1", "there is no config.steps.x; set the field that it would be in"),
    ("steps", "cannot parse --config.steps: a value is missing"),
    ("steps=many", "invalid literal for int() with base 10: 'many'"),
    ("model=3", "cannot parse --config.model=3: Could not override field 'model'"),
    ("attention.layers={0: {}, '0': {}}", "keys of one mapping differ in type, such as 0 and '0'"),
]


@pytest.mark.parametrize(("flag", "words"), FLAGS)
def test_a_flag_that_cannot_be_taken(flag, words):
    with pytest.raises(ConfigFileError, match=re.escape(words)) as error:
        config.load("gpt2_bf16:tiny", [f"--config.{flag}"])
    assert "\n" not in str(error.value)


def test_of_several_flags_the_one_that_cannot_be_taken_is_named():
    flags = ["--config.seed=3", "--config.steps=many", "--config.batch_size=8"]
    with pytest.raises(ConfigFileError, match=r"^cannot parse --config\.steps=many: invalid lit"):
        config.load("gpt2_bf16:tiny", flags)
    flags[1:2] = ["--config.steps=7", "--config.attention.implementation=dense"]  # None by default
    taken = config.load("gpt2_bf16:tiny", flags)
    assert (taken["seed"], taken["steps"], taken["batch_size"]) == (3, 7, 8)
    assert taken["attention"]["implementation"] == "dense"


@pytest.mark.parametrize("name", ["coordinator_address", "num_processes", "process_id"])
def test_flags_of_several_processes_need_distributed(monkeypatch, capsys, name):
    monkeypatch.chdir(ROOT)
    assert main(["train", "--config=gpt2_bf16:tiny", f"--{name}=2"]) == 1
    assert f"--{name} needs --distributed" in capsys.readouterr().err


def test_a_section_that_is_not_there_is_told_in_one_line(capsys):
    assert main(["train", "--config=gpt2_bf16:tiny", "--config.optimzer.peak_lr=3"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: unknown field config.optimzer (did you mean optimizer?)")


@pytest.mark.parametrize("path", sorted(config.shipped().glob("*.py")), ids=lambda path: path.stem)
def test_the_configs_import_nothing_of_the_library(path):
    imports = [node for node in ast.walk(ast.parse(path.read_text())) if hasattr(node, "names")]
    names = [getattr(node, "module", None) or node.names[0].name for node in imports]
    assert {name.partition(".")[0] for name in names} <= {
        *("copy", "pathlib", "runpy"),  # in Python itself
        "ml_collections",
        "jax",  # to find out whether there is an accelerator
    }


def test_the_config_names_every_field_of_numerics():
    assert {*config.load("gpt2_bf16:tiny")["attention"]["points"], "kv_block"} == {
        *Numerics.__dataclass_fields__
    }
