"""Broken inputs of commands, drawn at random: damaged files and mistyped words.

A case is a command that would succeed, with one thing broken: a byte, an array, a value of a JSON
file, a word. It follows from its number alone, so a failure names the command that repeats it:

    pytest tests/commands/test_command_fuzz.py -k "diagnose-17"
"""

import contextlib
import io
import json
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from command import ROOT
from safetensors.numpy import save_file

from lowprec_attn.commands.main import main
from lowprec_attn.lab import experiment
from lowprec_attn.lab.workdir import ArmRun

SEED = 41
SECONDS = 30  # the limit for a command on inputs of this size
_LINES = 40  # the limit for an error

# Texts that people and scripts type in place of a number, a name or a path.
WORDS = (
    "", " ", "-", "--", "-1", "0", "1", "3.5", "1e400", "-inf", "nan", "9" * 40, "0x10", "None",
    "true", "[]", "{}", "all", "*", "a\nb", "\x1b[31m", "é", "\udc80", "x" * 5000, "../..", ".",
    "/", "/dev/null/x", "missing", "--help=1", "--config.", "--config.=1", "$(true)", "%s%n",
)  # fmt: skip
# Values that replace a value of a JSON or TOML file.
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 10**30, 0.5, 1e308, float("nan"), "", "x", "\x1b[2J", [], {}, [[]], [None],
    {"a": {"a": []}}, ["x", 1],
)  # fmt: skip

_Rng = np.random.Generator


def check(command: str, number: int, directory: Path) -> str:
    """Runs one case; returns `refused` or `served`.

    Raises:
      AssertionError: an exception left the command, it gave no message, it wrote over its input, or
        it took too long.
    """
    rng = np.random.default_rng([SEED, list(COMMANDS).index(command), number])
    with contextlib.chdir(directory):
        arguments, inputs = COMMANDS[command](rng)
        before = {path: _content(path) for path in inputs}
        out, err, start = io.StringIO(), io.StringIO(), time.monotonic()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = main(arguments)
            except SystemExit as ended:  # raised by argparse
                code = ended.code
        told = f"{command}-{number}: {arguments!r:.2000}\nexit {code}\n{err.getvalue()[-3000:]}"
        assert time.monotonic() - start < SECONDS, told
        assert code in (0, 1, 3), told
        assert "Traceback" not in err.getvalue(), told
        if code == 1:
            lines = err.getvalue().splitlines()
            assert any(line.startswith("error: ") for line in lines), told
            assert len(lines) < _LINES, told
            assert re.search(r"error: .*\w{3}", err.getvalue()), told
        assert not set(err.getvalue() + out.getvalue()) & set("\x1b\x00\x07"), told
        assert {path: _content(path) for path in inputs} == before, f"changed its input\n{told}"
        return "served" if code in (0, 3) else "refused"


def _content(path: Path) -> bytes | str | None:
    """The contents of a file, or the target of a link; None for anything else."""
    if path.is_symlink():
        return f"→ {path.readlink()}"
    return path.read_bytes() if path.is_file() else None


def _pick(rng: _Rng, options: Any) -> Any:
    return options[int(rng.integers(len(options)))]


def _damage(rng: _Rng, path: Path) -> None:
    """Damages one byte, a part or all of a file, or replaces or removes the file."""
    data = bytearray(path.read_bytes())
    kind = _pick(rng, ("byte", "byte", "cut", "cut", "doubled", "zeros", "empty", "other", "gone"))
    if kind == "byte" and data:
        for _ in range(int(rng.integers(1, 4))):
            data[int(rng.integers(len(data)))] = int(rng.integers(256))
    elif kind == "cut":
        del data[int(rng.integers(len(data) + 1)) :]
    elif kind == "doubled":
        data += bytes(data)
    elif kind == "zeros" and data:
        at = int(rng.integers(len(data)))
        data[at : at + 16] = bytes(len(data[at : at + 16]))
    elif kind == "empty":
        data.clear()
    path.unlink()
    if kind == "other":
        _pick(
            rng, (path.mkdir, lambda: path.symlink_to(path.name), lambda: path.symlink_to("/none"))
        )()
    elif kind != "gone":
        path.write_bytes(bytes(data))


def _retyped(rng: _Rng, value: Any) -> Any:
    """A JSON value in which one entry is replaced or removed."""
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key in list(node) if isinstance(node, dict) else range(len(node)):
            places.append((node, key))
            if isinstance(node[key], dict | list):
                walk(node[key])

    if not isinstance(value, dict | list) or not value:
        return _pick(rng, VALUES)
    walk(value)
    node, key = _pick(rng, places)
    if rng.random() < 0.3:
        del node[key]
    else:
        node[key] = _pick(rng, VALUES)
    return value


def _mistype(rng: _Rng, arguments: list[str]) -> list[str]:
    """Replaces, removes, repeats or moves one word."""
    words = list(arguments)
    at = int(rng.integers(1, len(words)))  # the command itself stays
    kind = _pick(rng, ("word", "word", "value", "gone", "twice", "moved"))
    if kind == "value" and "=" in words[at]:
        words[at] = words[at].partition("=")[0] + "=" + _pick(rng, WORDS)
    elif kind in ("word", "value"):
        words[at] = _pick(rng, WORDS)
    elif kind == "gone":
        del words[at]
    elif kind == "twice":
        words.insert(at, words[at])
    else:
        words.insert(int(rng.integers(1, len(words))), words.pop(at))
    return words


def _capture(rng: _Rng) -> tuple[list[str], list[Path]]:
    """`diagnose` of an npz file in which one array is replaced."""
    draw = rng.standard_normal
    arrays: dict[str, Any] = {
        n: draw((1, 16, 2, 8)).astype(np.float32) for n in ("q", "k", "v", "do")
    }
    name = _pick(rng, list(arrays))
    x = arrays[name]
    other = {
        "nan": lambda: np.where(rng.random(x.shape) < 0.05, np.nan, x),
        "inf": lambda: np.where(rng.random(x.shape) < 0.05, -np.inf, x),
        "large": lambda: x * 1e30,
        "zero": lambda: x * 0,
        "integers": lambda: x.astype(np.int64),
        "complex": lambda: x.astype(np.complex64),
        "booleans": lambda: x > 0,
        "texts": lambda: x.astype("<U8"),
        "objects": lambda: np.array([{"a": 1}], object),
        "float64": lambda: x.astype(np.float64),
        "float16": lambda: x.astype(np.float16),
        "scalar": lambda: x[0, 0, 0, 0],
        "empty": lambda: x[:, :0],
        "three axes": lambda: x[0],
        "five axes": lambda: x[None],
        "fewer tokens": lambda: x[:, :9],
        "fewer heads": lambda: x[:, :, :1],
        "smaller heads": lambda: x[..., :4],
        "transposed": lambda: np.swapaxes(x, 1, 2),
    }
    arrays[name] = other[_pick(rng, list(other))]()
    extra = (
        "scale",
        "is_causal",
        "mask",
        "bias",
        "attention_mask",
        "lse",
        "o",
        "w_q",
        "lengths",
        "x",
    )
    if rng.random() < 0.4:
        arrays[_pick(rng, extra)] = _pick(
            rng, (x, x[0, 0, 0, 0], np.nan, -1.0, 0, True, "yes", x[..., 0])
        )
    if rng.random() < 0.2:
        del arrays[name]
    np.savez("a.npz", **arrays)
    return ["diagnose", "a.npz"], [Path("a.npz")]


def _damaged_capture(rng: _Rng) -> tuple[list[str], list[Path]]:
    """`diagnose` of an npz file whose bytes are damaged."""
    draw = np.random.default_rng(0).standard_normal
    np.savez("a.npz", **{n: draw((1, 16, 2, 8)).astype(np.float32) for n in ("q", "k", "v", "do")})
    _damage(rng, Path("a.npz"))
    return ["diagnose", "a.npz"], [Path("a.npz")]


def _diagnose_words(rng: _Rng) -> tuple[list[str], list[Path]]:
    draw = np.random.default_rng(0).standard_normal
    np.savez("a.npz", **{n: draw((1, 16, 2, 8)).astype(np.float32) for n in ("q", "k", "v", "do")})
    options = [
        "--full",
        "--scale=0.3",
        "--kv-block=8",
        "--numerics=flash",
        "--rows=4",
        "--json=o.json",
    ]
    chosen = [option for option in options if rng.random() < 0.5]
    return _mistype(rng, ["diagnose", "a.npz", *chosen]), [Path("a.npz")]


def _run_directory(rng: _Rng) -> tuple[Path, list[Path]]:
    """A finished run of a tiny model, with one file damaged or retyped."""
    run = Path(shutil.copytree(ROOT / "tests" / "fixtures" / "run", "run"))
    files = sorted(path for path in run.rglob("*") if path.is_file())
    named = [path for path in files if path.suffix in (".json", ".jsonl", ".txt")]
    path = _pick(rng, named if rng.random() < 0.7 else files)
    if rng.random() < 0.5 and path.suffix in (".json", ".jsonl"):
        lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        at = int(rng.integers(len(lines)))
        lines[at] = json.dumps(_retyped(rng, json.loads(lines[at])))
        path.write_text("\n".join(lines) + "\n")
    else:
        _damage(rng, path)
    return run, files


def _report(rng: _Rng) -> tuple[list[str], list[Path]]:
    run, files = _run_directory(rng)
    return ["report", str(run)], files


def _diagnose_run(rng: _Rng) -> tuple[list[str], list[Path]]:
    run, files = _run_directory(rng)
    return ["diagnose", str(run)], files


def _collect(rng: _Rng) -> tuple[list[str], list[Path]]:
    """`lab collect` of an arm whose run or definition is damaged or retyped."""
    defined = experiment.load(ROOT / "configs" / "laptop.toml").select(["flash"]).with_seeds([1])
    (trial,) = defined.trials
    work = Path("work")
    work.mkdir()
    arm = ArmRun(work.absolute(), trial.name)
    arm.define(defined, trial)
    run, _ = _run_directory(rng)
    shutil.move(run, work / trial.name)
    if rng.random() < 0.4:
        text = json.dumps(_retyped(rng, json.loads(arm.definition.read_text())))
        arm.definition.write_text(text)
    return ["lab", "collect", "work", "out"], [p for p in work.rglob("*") if p.is_file()]


def _experiment(rng: _Rng) -> tuple[list[str], list[Path]]:
    """`lab run` of a damaged definition, whose text is missing so that nothing trains."""
    text = (
        'config = "gpt2_bf16:tiny"\nseeds = [1, 2]\npositive_control = "flash"\n\n[shared]\n'
        'steps = 2\n\n[arms.flash]\nattention.numerics = "flash"\n\n'
        '[arms.exact]\nattention.numerics = "exact"\nattention.points.ds = "bfloat16"\n'
    )
    path = Path("mine.toml")
    if rng.random() < 0.5:
        lines = text.splitlines()
        at = int(rng.integers(len(lines)))
        name = lines[at].partition(" = ")[0]
        lines[at] = f"{name} = {json.dumps(_pick(rng, VALUES))}" if " = " in lines[at] else "[[x]]"
        path.write_text("\n".join(lines))
    else:
        path.write_text(text)
        _damage(rng, path)
    missing = "--config.data.path=nowhere"
    return ["lab", "run", "mine.toml", "--workdir=runs", missing], [path]


def _lab_words(rng: _Rng) -> tuple[list[str], list[Path]]:
    run = ["lab", "run", "laptop", "--workdir=runs", "--arms", "flash", "--seeds", "1", "--jobs=1"]
    others = (["lab", "collect", "runs", "out"], ["lab", "report", "out", "--layer=0"])
    if rng.random() < 0.4:
        return _mistype(rng, list(_pick(rng, others))), []
    return [*_mistype(rng, run), "--config.data.path=nowhere"], []


def _train_words(rng: _Rng) -> tuple[list[str], list[Path]]:
    """`train` on a missing text, so that nothing trains."""
    fields = (
        "steps",
        "batch_size",
        "seed",
        "model.layers",
        "optimizer.peak_lr",
        "attention.kv_block",
    )
    fields += ("attention.numerics", "attention.row_max", "attention.points.output", "eval_every")
    fields += (
        "checkpoint_every",
        "data.tokenizer",
        "optimizer.clip_norm",
        "spike.factor",
    )
    flag = f"--config.{_pick(rng, fields)}={_pick(rng, WORDS)}"
    base = ["train", "--config=gpt2_bf16:tiny", "--workdir=run", "--config.data.path=nowhere"]
    return [*base, flag] if rng.random() < 0.7 else [*_mistype(rng, base), base[-1]], []


def _prepare(rng: _Rng) -> tuple[list[str], list[Path]]:
    name, content = _pick(
        rng,
        (
            ("a.txt", "one two three\n" * 40),
            ("a.jsonl", "".join(json.dumps({"text": f"line {i}"}) + "\n" for i in range(40))),
        ),
    )
    path = Path(name)
    path.write_text(content)
    arguments = [
        "prepare",
        "out",
        "--text",
        name,
        "--tokenizer=bytes",
        "--val-fraction=0.2",
        "--seed=1",
    ]
    if rng.random() < 0.5:
        return _mistype(rng, arguments), [path]
    _damage(rng, path)
    return arguments, [path]


def _check_words(rng: _Rng) -> tuple[list[str], list[Path]]:
    """`check` of a function that refuses every call, so that nothing is measured."""
    module = Path(f"ours_{rng.integers(10**9)}.py")  # a module is imported only once
    module.write_text("import jax\ndef f(q, k, v): raise ValueError('not here')\n")
    options = ["--window=3,0", "--soft-cap=5", "--tokens=16", "--head-size=8", "--scale=0.5"]
    options += ["--seed=1", "--keyword=mask=mask", "--dtype=float16", "--json=o.json"]
    if rng.random() < 0.6:
        at = int(rng.integers(len(options)))
        options[at] = options[at].partition("=")[0] + "=" + _pick(rng, WORDS)
        return ["check", f"{module.stem}:f", "--causal", *options], [module]
    return _mistype(rng, ["check", f"{module.stem}:f", "--causal", *options]), [module]


def _llama(rng: _Rng) -> tuple[list[str], list[Path]]:
    """`diagnose` of a folder with a damaged config and no weights, so that nothing computes."""
    folder = Path("model")
    folder.mkdir()
    config = {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "hidden_size": 8,
        "head_dim": 4,
        "intermediate_size": 16,
        "max_position_embeddings": 16,
        "vocab_size": 50,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "attention_bias": False,
    }
    paths = [folder / "config.json", folder / "model.safetensors", Path("ids.npy")]
    retyped = rng.random() < 0.7
    paths[0].write_text(json.dumps(_retyped(rng, config) if retyped else config))
    save_file({"norm.weight": np.zeros(8, np.float32)}, paths[1])
    np.save(paths[2], np.arange(9))
    if not retyped:
        _damage(rng, _pick(rng, paths))
    return ["diagnose", "model", "--text=ids.npy", "--numerics=flash"], paths


# Functions that make the arguments of each command and, in the current directory, its input files.
COMMANDS: dict[str, Callable[[_Rng], tuple[list[str], list[Path]]]] = {
    "arrays": _capture,
    "npz": _damaged_capture,
    "diagnose": _diagnose_words,
    "report": _report,
    "run": _diagnose_run,
    "collect": _collect,
    "experiment": _experiment,
    "lab": _lab_words,
    "train": _train_words,
    "prepare": _prepare,
    "check": _check_words,
    "llama": _llama,
}
