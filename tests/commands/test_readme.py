"""The commands of README, docs/train.md and docs/exploded.md work as they are written."""

import gzip
import json
import re
import shlex

import pytest
from command import ROOT, TINY

from lowprec_attn.commands import config, diagnose, lab, prepare, train
from lowprec_attn.commands.main import main
from lowprec_attn.lab import experiment
from lowprec_attn.training.config import train_settings

FILES = ("README.md", "docs/train.md", "docs/exploded.md")
PAGES = "\n".join((ROOT / name).read_text() for name in FILES)
BLOCKS = re.findall(r"^```bash\n(.*?)^```", PAGES, re.DOTALL | re.MULTILINE)
LINES = "\n".join(BLOCKS).replace("\\\n", " ").splitlines()
COMMANDS = [
    shlex.split(part, comments=True) for line in LINES for part in re.split(r"&&|\|", line) if part
]
TRAIN = [c[2:] for c in COMMANDS if c[:2] == ["python", "train.py"]]
OTHER = [c[1:] for c in COMMANDS if c[:1] == ["lowprec-attn"]]


@pytest.fixture
def parsed(monkeypatch):
    """Returns a function that parses a command without running it, and returns its arguments."""

    def parse(words):
        found = []
        for module in (train, prepare, lab, diagnose):
            monkeypatch.setattr(module, "run", lambda args: found.append(args))
        assert main(words) == 0, words
        return found[0]

    return parse


def matches(word):
    """What a shell in a fresh clone makes of a word."""
    return sorted(ROOT.glob(word)) if "*" in word else [word]


def test_every_pattern_matches_files_of_a_clone():
    patterns = [word for words in OTHER for word in words if "*" in word]
    assert patterns and all(map(matches, patterns)), patterns


def test_there_are_commands_of_both_kinds():
    assert len(TRAIN) >= 6
    assert {words[0] for words in OTHER} >= {"prepare", "lab", "diagnose"}


def test_every_training_is_one_that_can_start(parsed):
    """Config, fields and values are valid, and an earlier command makes what a run reads."""
    made = set()
    for words in [*OTHER, *TRAIN]:
        if words[0] == "prepare":
            made.add(str(parsed(words).out))
    for words in TRAIN:
        args = parsed(["train", *words])
        settings = train_settings(config.load(str(ROOT / args.config), args.config_flags))
        assert {settings.data.path, settings.resume_from} - {None} <= made, words
        made.add(str(args.workdir))


def test_every_experiment_is_one_that_can_start(parsed):
    found = [parsed(words) for words in OTHER if words[0] == "lab"]
    assert {args.action for args in found} == {"run", "collect", "report"}
    for args in found:
        if args.action == "run":
            experiment.load(config.config_file(args.experiment, ".toml"))
    collect, report = found[-2:]
    assert collect.workdir in {args.workdir for args in found if args.action == "run"}
    assert report.results == collect.results


def test_every_diagnosis_is_one_that_can_start(parsed):
    """An earlier command makes the run that it examines."""
    made = {word.partition("=")[2] for words in TRAIN for word in words if "workdir=" in word}
    sources = [p for words in OTHER if words[0] == "diagnose" for p in parsed(words).source]
    assert {str(path) for path in sources if path.suffix != ".npz"} == {"runs/mine"} <= made
    assert sources[0].suffix == ".npz"


@pytest.mark.slow
def test_a_text_is_prepared_trained_on_and_resumed_from(tmp_path, monkeypatch):
    """The commands about one text run in order, on a small model."""
    monkeypatch.chdir(tmp_path)
    with gzip.open("rows.jsonl.gz", "wt") as rows:
        rows.writelines(json.dumps({"text": "a line of text\n" * 30}) + "\n" for _ in range(30))
    for words in OTHER:
        if words[0] == "prepare":
            words = [str(path) for word in words for path in matches(word)]
            # The default tokenizer downloads its vocabulary.
            tokenizer = [] if "--tokenizer" in words else ["--tokenizer", "bytes"]
            assert main([*words, *tokenizer]) == 0, words
    # All sizes except the number of steps, which the page sets.
    small = ["--config.devices=1"]
    small += [f"--config.{name}={value}" for name, value in TINY.items() if name != "steps"]
    about_it = [words for words in TRAIN if "--config.data.path=data/mine" in words]
    assert len(about_it) == 2
    for words in about_it:
        steps = [] if any("steps=" in word for word in words) else ["--config.steps=8"]
        words = [word.replace("steps=1000", "steps=12") for word in words]
        assert main(["train", *words, *small, *steps]) == 0, words
