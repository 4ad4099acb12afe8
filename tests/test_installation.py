"""One address of the source everywhere, and advice to install something that can be followed."""

import importlib.metadata
import re
import shlex
import sys
import tomllib
from email.message import Message

import pytest
from command import ROOT

from lowprec_attn import __version__, installation
from lowprec_attn.commands.main import main

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Matches anything like the address of a repository of this name, with or without a scheme.
ADDRESS = re.compile(r"(?:\w+://|git@)?[\w.-]+\.\w+[/:][\w.-]+/lowprec[-_]attn\b")
INSTALLS = re.compile(r"pip install (?:-\S+ )*['\"]?lowprec-attn[^\n]*")


# The folders that are searched, besides the files at the top.
FOLDERS = ("lowprec_attn", "pallas_kernels", "configs", "benchmarks", "tests", "docs", "colab")
SUFFIXES = {".md", ".toml", ".cff", ".py", ".ipynb", ".yaml"}


@pytest.fixture(scope="module")
def pages():
    """The text of every file, by name."""
    paths = [*ROOT.iterdir(), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))]
    files = (path for path in paths if path.suffix in SUFFIXES and path.is_file())
    return {str(path.relative_to(ROOT)): path.read_text(errors="replace") for path in files}


def test_no_page_spells_the_address_of_the_source_differently(pages):
    found = {name: set(ADDRESS.findall(text)) for name, text in pages.items()}
    assert {name for name, addresses in found.items() if addresses} >= {
        "README.md",
        "CITATION.cff",
        "pyproject.toml",
        *(name for name in pages if name.startswith("colab/")),
    }
    assert set().union(*found.values()) == {installation.address()}


def test_no_page_installs_the_package_from_an_index(pages):
    found = [line for text in pages.values() for line in INSTALLS.findall(text)]
    assert found  # at least the README's
    assert [line for line in found if f"@ git+{installation.address()}" not in line] == []


def test_the_version_is_the_same_everywhere(pages):
    assert PROJECT["version"] == __version__
    assert f"\nversion: {__version__}\n" in pages["CITATION.cff"]
    assert f"\n## {__version__}\n" in pages["CHANGELOG.md"]


def test_in_a_checkout_the_advice_names_it():
    assert installation.address() == PROJECT["urls"]["Source"]
    *words, target = shlex.split(installation.command("train,data"))
    assert words == ["pip", "install", "-e"]
    assert target == f"{ROOT}[train,data]"


def test_elsewhere_the_advice_names_the_address(monkeypatch, tmp_path):
    metadata = Message()
    metadata["Project-URL"] = f"Source, {PROJECT['urls']['Source']}"
    monkeypatch.setattr(installation, "_CHECKOUT", tmp_path)
    monkeypatch.setattr(importlib.metadata, "metadata", lambda name: metadata)
    *words, target = shlex.split(installation.command("data"))
    assert words == ["pip", "install"]
    assert target == f"lowprec-attn[data] @ git+{PROJECT['urls']['Source']}"


def test_every_extra_that_is_advised_exists(pages):
    advised = re.findall(r"""installation\.command\(["']([\w,-]+)["']\)""", "".join(pages.values()))
    advised += re.findall(r"pip install[^\n]*'\.\[([\w,-]+)\]'", "".join(pages.values()))
    assert {extra for words in advised for extra in words.split(",")} <= set(
        PROJECT["optional-dependencies"]
    )


@pytest.mark.parametrize(
    ("module", "extra"),
    [
        ("ml_collections", "train"),
        ("orbax.checkpoint", "train"),
        ("tensorboardX", "train"),
        ("tiktoken", "data"),
        ("safetensors", "diagnose"),
        ("etils.epath", "train"),  # a dependency of orbax-checkpoint
    ],
)
def test_the_advice_for_a_module_names_the_extra_that_brings_it(monkeypatch, module, extra):
    assert installation.command_for(module) == installation.command(extra)
    lines = [f'{line}; extra == "{name}"' for name, of in PROJECT["optional-dependencies"].items()
             for line in of]  # fmt: skip
    monkeypatch.setattr(installation, "_CHECKOUT", ROOT / "nowhere")
    monkeypatch.setattr(installation, "address", lambda: "somewhere")
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ["numpy>=2.0", *lines])
    assert installation.command_for(module) == installation.command(extra)


@pytest.mark.parametrize(
    ("missing", "command"),
    [
        ("ml_collections", ["train", "--config=gpt2_bf16:tiny"]),
        ("matplotlib", ["lab", "report", "nowhere"]),
    ],
)
def test_a_command_without_its_packages_is_one_line(monkeypatch, capsys, missing, command):
    importing = ("lowprec_attn.lab", "lowprec_attn.commands", "lowprec_attn.runs.pages")
    loaded = [name for name in sys.modules if name.startswith(importing)]
    for name in loaded:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    assert main(command) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert missing in line
    assert line.endswith(f"; {installation.command('train')}")
