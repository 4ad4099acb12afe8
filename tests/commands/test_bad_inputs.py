"""What a new user may give a command, by mistake or in malice: one line, exit code 1, no loss.

Each row of the table prepares files, names a command, and gives words of the error. The command
must exit with 1, print one line, and leave every existing file as it was. test_diagnose_masks.py
and tests/data/test_text_files.py test files that are read instead of refused.
"""

import contextlib
import errno
import io
import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from command import ROOT
from records.runs import layers, record_run
from safetensors.numpy import save_file

from lowprec_attn import files
from lowprec_attn.commands import main as main_module
from lowprec_attn.commands.main import main

rng = np.random.default_rng(0)
GOOD = {n: rng.standard_normal((1, 32, 2, 8)).astype(np.float32) for n in ("q", "k", "v", "do")}
TINY = ["train", "--config=gpt2_bf16:tiny", "--workdir=run"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def npz(name="a.npz", without=(), **arrays):
    np.savez(name, **{n: x for n, x in (GOOD | arrays).items() if n not in without})
    return name


def of(*words, **arrays):
    """`diagnose` of a file with these arrays in addition."""

    def make():
        return ["diagnose", npz(**arrays), *words]

    return make


def text(name, content):
    Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return name


def link(name, target):
    Path(name).symlink_to(target)
    return name


def recorded(name="run", **json_files):
    """A run directory in which some JSON files are replaced."""
    run = record_run(Path(name), [3.0, 2.9], {0: layers({}, {})}, {2: 2.8}, steps=2)
    for file, content in json_files.items():
        path = run.path / file.replace("__", ".")
        path.write_text(content + "\n")
    return str(run.path)


def config(content, name="mine.py"):
    return ["train", f"--config={text(name, content)}"]


def hugging_face(**fields):
    shape = {"n_layer": 1, "n_head": 1, "n_embd": 8, "n_positions": 8, "vocab_size": 8}
    Path("model").mkdir()
    text("model/config.json", json.dumps({"model_type": "gpt2", **shape, **fields}))
    save_file({"wte.weight": np.zeros((8, 8), np.float32)}, "model/model.safetensors")
    return ["diagnose", "model", "--text", text("text.txt", "text")]


def header_of(dtype, shape, size):
    """A safetensors file with one array, whose format NumPy lacks or whose size is too large."""
    head = json.dumps({"q": {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}}).encode()
    return struct.pack("<Q", len(head)) + head + bytes(min(size, 64))


def huge_npy():
    head = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1, 300000000000, 2, 8), }"
    head += b" " * (118 - len(head) - 1) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head


def huge_npz():
    import zipfile

    npz("a.npz", without=("q",))
    with zipfile.ZipFile("a.npz", "a") as file:
        file.writestr("q.npy", huge_npy())
    return ["diagnose", "a.npz"]


def prepare(*words, content=b"a\nb\nc\nd\n"):
    return lambda: ["prepare", "out", "--text", text("a.txt", content), "--tokenizer=bytes", *words]


def at_old_files(*words):
    def make():
        Path("out").mkdir()
        text("out/train.bin", b"old")
        return ["prepare", "out", "--tokenizer=bytes", "--overwrite", *words]

    return make


NAN, INF = np.array(np.nan), np.array(np.inf)
DEEP = """
from ml_collections import ConfigDict
def get_config(variant=""):
    top = inner = ConfigDict()
    for _ in range(3000):
        inner.a = ConfigDict()
        inner = inner.a
    return top
"""
MIXED = """
from lowprec_attn.commands import config
def get_config(variant=""):
    made = config.module("gpt2_bf16").get_config("tiny")
    made.attention.layers = {0: {"numerics": "flash"}, "1": {"numerics": "flash"}}
    return made
"""

CASES = {
    # Files: values that hide or change scores
    "a bias in an npz": (of(bias=np.ones((1, 2, 32, 32))), "bias adds to the scores"),
    "a negative cap": (of(softcap=np.array(-1.0)), "must be greater than 0, or None for no cap"),
    "a sink too few": (of(sinks=np.ones(3, np.float32)), "sinks must be 2 numbers"),
    "a cap and after_cast": (
        of("--numerics", "corrected_after_cast", softcap=np.array(30.0)),
        "no attention has delta=after_cast with logits_soft_cap=30.0",
    ),
    # Files: values that would suggest a false cause
    "a scale of NaN in a file": (of(scale=NAN), "scale must be a finite number, got nan"),
    "an infinite scale in a file": (of(scale=INF), "scale must be a finite number, got inf"),
    "a scale of 0 in a file": (of(scale=np.array(0.0)), "scale must not be 0"),
    "a scale of 0": (of("--scale", "0"), "--scale must not be 0 in float32"),
    "a scale of 1e300": (of("--scale", "1e300"), "--scale must be a finite number in float32, got"),
    "a scale of 1e-300": (of("--scale", "1e-300"), "--scale must not be 0 in float32"),
    "a scale of 1e-45": (of("--scale", "1e-45"), "--scale must not be 0 in float32"),
    "a scale far below the cap": (
        of("--scale", "1e-30", softcap=np.array(1e20)),
        "--scale 1e-30: scale / logits_soft_cap, the factor of q kᵀ, must fit float32",
    ),
    "float64 beyond float32": (
        of(q=np.full((1, 32, 2, 8), 1e39)),
        r"q holds 1e\+39 at \[0, 0, 0, 0\], which float32 cannot hold",
    ),
    "causal by NaN": (of(is_causal=NAN), "is_causal must be true or false, got nan"),
    "fp8 in safetensors": (
        lambda: ["diagnose", text("a.safetensors", header_of("F8_E4M3", [1, 8, 1, 8], 64))],
        "q is F8_E4M3, which is not read; save it as bfloat16",
    ),
    # Outputs never overwrite inputs and never follow what somebody else has made
    "JSON over the input": (lambda: ["diagnose", npz(), "--json", "a.npz"], "same command reads"),
    "HTML over the input": (lambda: ["diagnose", npz(), "--html", "./a.npz"], "same command reads"),
    "JSON over a hard link of the input": (
        lambda: [os.link(npz(), "b.npz"), "diagnose", "a.npz", "--json", "b.npz"][1:],
        "the same command reads a.npz",
    ),
    "JSON through a link": (
        lambda: ["diagnose", npz(), "--json", link("b.json", text("mine", "mine"))],
        "cannot write b.json: a symbolic link stands there",
    ),
    "HTML through a dangling link": (
        lambda: ["diagnose", npz(), "--html", link("b.html", "nowhere")],
        "cannot write b.html: a symbolic link stands there",
    ),
    "HTML to a device": (of("--html", "/dev/null"), "/dev/null: a device, pipe or socket stands"),
    "JSON and HTML to one file": (of("--json", "b", "--html", "b"), "both name b; give two files"),
    "JSON and HTML to one file by two paths": (
        lambda: [os.mkdir("x"), "diagnose", npz(), "--json", "b", "--html", "x/../b"][1:],
        "both name b; give two files",
    ),
    "JSON over the text": (
        lambda: [*hugging_face(), "--json", "text.txt"],
        "the same command reads text.txt",
    ),
    "JSON over a run's config": (
        lambda: ["diagnose", recorded(), "--json", "run/config.json"],
        "cannot write run/config.json: it is there already, and the same command reads",
    ),
    "a page over a run's metrics": (
        lambda: ["report", recorded(), "--html", "run/metrics.jsonl"],
        "cannot write run/metrics.jsonl: it is there already, and the same command reads",
    ),
    "a page through a link": (
        lambda: ["report", recorded(), "--html", link("b.html", text("mine", "mine"))],
        "cannot write b.html: a symbolic link stands there",
    ),
    "a report through a link": (
        lambda: ["report", recorded(), link("run/report.html", text("mine", "mine"))][:2],
        "cannot write .*run/report.html: a symbolic link stands there",
    ),
    "prepare over its text": (
        at_old_files("--text", "out/train.bin"),
        "out/train.bin is read and would be replaced",
    ),
    # prepare
    "prepare of token ids": (prepare(content=np.arange(99, dtype="<u2").tobytes()), "is binary"),
    "prepare of half a gzip": (prepare(content=b"\x1f\x8b\x08" + bytes(9)), "is damaged gzip"),
    "JSON lines as text": (
        prepare(content=b'{"text": "a"}\n'),
        "is JSON: give it by --dataset json",
    ),
    "a pattern without files": (
        ["prepare", "out", "--text", "*.none", "--tokenizer=bytes"],
        "no file matches this pattern",
    ),
    # Ranges, before work starts
    "1e9 layers": ([*TINY, "--config.model.layers=1000000000"], "layers must be .* at most 4096"),
    "1e8 heads": ([*TINY, "--config.model.heads=100000000"], "heads must be at least 1 and"),
    "2^24 heads in all": (
        [*TINY, "--config.model.layers=4096", "--config.model.heads=4096"],
        "model.layers must be at most 131072 / heads",
    ),
    "a context of 1e12": ([*TINY, "--config.model.context=1000000000000"], "context must be at"),
    "a width of 1e12": ([*TINY, "--config.model.width=1000000000000"], "width must be at least 1"),
    "1e9 batches of validation": (
        [*TINY, "--config.eval_batches=1000000000"],
        "eval_batches 1000000000 of batch_size 8 are 8000000000 windows, and built-in text",
    ),
    "1e20 sequences a batch": ([*TINY, f"--config.batch_size={10**20}"], "batch_size must be"),
    "a warm-up of 2^31": (
        [*TINY, "--config.optimizer.warmup_steps=2147483648"],
        "warmup_steps must be 0 or more and below 2147483648",
    ),
    "an infinite clip norm": (
        [*TINY, "--config.optimizer.clip_norm=inf"],
        "clip_norm must be positive and finite, or None, got inf",
    ),
    "0 devices": ([*TINY, "--config.devices=0"], "devices must be at least 1, or None, got 0"),
    "steps of None": ([*TINY, "--config.steps=None"], "config.steps must be int, got None"),
    "process -1": (
        [*TINY, "--distributed", "--num_processes=2", "--process_id=-1"],
        "--process_id must be 0 or more and below --num_processes 2, got -1",
    ),
    "process 2 of 2": (
        [*TINY, "--distributed", "--num_processes=2", "--process_id=2"],
        "--process_id must be 0 or more and below --num_processes 2, got 2",
    ),
    "0 processes": (
        [*TINY, "--distributed", "--num_processes=0"],
        "--num_processes must be at least 1, got 0",
    ),
    "Hugging Face: 1e8 layers": (lambda: hugging_face(n_layer=10**8), "n_layer 100000000, not a"),
    "Hugging Face: 4,096 layers of one": (lambda: hugging_face(n_layer=4096), "no tensor"),
    "Hugging Face: 1e12 positions": (lambda: hugging_face(n_positions=10**12), "n_positions 1000"),
    "1e11 jobs": (
        lambda: [
            *("lab", "run", text("a.toml", "config='x.py'\n[arms.a]\n"), "--workdir=out"),
            "--jobs=99999999999",
        ],
        "--jobs must be at most 1024, got 99999999999",
    ),
    "a pipe that nobody writes": (
        lambda: [os.mkfifo("pipe"), *hugging_face()[:-1], "pipe"][1:],
        "there is no tensor|--text pipe: is not a file",
    ),
    # One case for each kind of traceback
    "a deep config": (lambda: config(DEEP), "config: its mappings are nested too deep"),
    "keys of two types": (lambda: config(MIXED), "keys of one mapping differ in type"),
    "sys.exit in a config": (
        lambda: config("import sys\ndef get_config(variant=''): sys.exit(3)"),
        "mine.py is not a config: SystemExit: 3",
    ),
    "a config without .py": (
        lambda: config("def get_config(variant=''): return 3", "plain"),
        "plain is not a config: get_config gives a int, no ConfigDict",
    ),
    "arrays that claim terabytes": (huge_npz, "q does not fit into memory"),
    "ids that claim terabytes": (
        lambda: [*hugging_face()[:-1], text("ids.npy", huge_npy())],
        "not a readable npy file|there is no tensor",
    ),
    "a safetensors file that claims terabytes": (
        lambda: ["diagnose", text("a.safetensors", header_of("F32", [1, 3 * 10**11, 2, 8], 64))],
        "not a readable safetensors file",
    ),
    "--html ''": (of("--html", ""), "cannot write .: Is a directory"),
    "--json ''": (of("--json", ""), "cannot write .: Is a directory"),
    "report --html ''": (lambda: ["report", recorded(), "--html", ""], "cannot write .: Is a dir"),
    "a figure of no format": (
        lambda: ["lab", "report", "records", "--figure", "f.xyz"],
        "f.xyz: a figure is written as one of .*png",
    ),
    "a list as environment.json's command": (
        lambda: ["report", recorded(environment__json='[{"command": 3}]')],
        "environment.json holds other records than starts",
    ),
    "a number as config.json's attention": (
        lambda: ["report", recorded(config__json='{"attention": 3}')],
        "config.json has 3 as attention; restore it from a copy",
    ),
    "a list as summary.json": (
        lambda: ["report", recorded(summary__json="[]")],
        "summary.json holds list, no record",
    ),
    "text as a rollback's step": (
        lambda: ["report", recorded(rollbacks__jsonl='{"to": "x"}')],
        "rollbacks.jsonl does not hold rollbacks",
    ),
    "lists as signals": (
        lambda: ["report", recorded(metrics__jsonl='{"step": 0, "signals": {"layer_0": [3]}}')],
        "run holds metrics that no run wrote",
    ),
    # Names that would control a terminal
    "a layer's name with escapes": (
        lambda: ["diagnose", npz(without="q", **{"\x1b[31mred\n\x9b/q": GOOD["q"]})],
        r"no array named k or key of \\x1b\[31mred\\n\\x9b; it holds \\x1b\[31mred\\n\\x9b/q",
    ),
}  # fmt: skip


def contents():
    """The bytes of every file below the current directory, and the target of every link."""
    paths = sorted(p for p in Path().rglob("*") if p.is_symlink() or p.is_file())
    return {str(p): os.readlink(p) if p.is_symlink() else p.read_bytes() for p in paths}


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_one_line_and_costs_nothing(case, capsys):
    make, words = CASES[case]
    argv = make() if callable(make) else make
    before = contents()
    capsys.readouterr()
    assert main(argv) == 1
    err = capsys.readouterr().err
    (line,) = [x for x in err.splitlines() if x and "tokenizing:" not in x]  # not the progress bar
    assert re.match("error: ", line)
    assert re.search(words, line)
    assert line.isprintable()
    assert contents() == before


NOT_FINITE = {
    "x": (GOOD | {"x": np.full((1, 32, 5), np.nan)}, "160 of 160 entries of x are NaN or infinite"),
    "w_q": (GOOD | {"w_q": np.full((5, 2, 8), np.inf)}, "80 of 80 entries of w_q are NaN"),
    "lse": (GOOD | {"lse": np.full((1, 2, 32), np.nan)}, "64 of 64 entries of lse are NaN"),
    "do": (GOOD | {"do": np.full((1, 32, 2, 8), np.nan)}, "512 of 512 entries of do are NaN"),
    "o": (GOOD | {"o": np.full((1, 32, 16), np.nan)}, "512 of 512 entries of O are NaN"),
    "q": (GOOD | {"q": np.full((1, 32, 2, 8), np.nan)}, "512 of 512 entries of q are NaN"),
}


@pytest.mark.parametrize("name", NOT_FINITE)
def test_what_is_not_finite_is_told_and_nothing_that_depends_on_it(name, capsys):
    arrays, words = NOT_FINITE[name]
    np.savez("a.npz", **arrays)
    assert main(["diagnose", "a.npz", "--numerics", "flash", "--json", "out.json"]) == 3
    text = capsys.readouterr().out
    verdicts = [line for line in text.splitlines() if line.startswith(("Verdict", "  also"))]
    assert len(verdicts) == 1
    assert words in verdicts[0]
    assert "(the first at [0, 0, 0" in verdicts[0]
    (layer,) = json.loads(Path("out.json").read_text())["layers"]
    kind = "non_finite_output" if name in ("o", "lse") else "non_finite_input"
    assert [finding["kind"] for finding in layer["findings"]] == [kind]
    measured = layer["signals"].get("flash", {})
    assert ("score_maximum" in measured) == (name != "q")
    assert ("delta_error_rms" in measured) == (name not in ("q", "do"))
    assert "query_weight_gradient_error" not in measured
    for values in measured.values():
        assert None not in values  # None would stand for NaN or infinity
    assert "inf" not in text.replace("infinite", "")


def test_the_layer_where_it_begins_is_named(capsys):
    names = [f"layer_{i:02d}" for i in range(4)]
    found = {f"{layer}/{name}": array for layer in names for name, array in GOOD.items()}
    bad = GOOD["v"].copy()
    bad[0, 3, 1, 2] = np.nan
    found |= {f"layer_{i:02d}/v": bad for i in (1, 2, 3)}
    found |= {f"layer_{i:02d}/do": bad for i in (0, 1, 2)}
    np.savez("a.npz", **found)
    assert main(["diagnose", "a.npz", "--numerics", "flash", "--html", "out.html"]) == 3
    text = capsys.readouterr().out
    first = "NaN or infinity stands first in layer_01 (v) of 3 layers that hold any"
    backwards = "Of dO, whose way is backwards, it stands first in layer_02, of 3 layers."
    for said in (text, Path("out.html").read_text()):
        assert first in said
        assert backwards in said
    assert "1 of 512 entries of v are NaN or infinite (the first at [0, 3, 1, 2])" in text


def test_one_ignored_argument_of_a_capture_is_a_note(capsys):
    assert main(["diagnose", npz(ignored=np.array("mask")), "--numerics", "flash"]) == 0
    assert "note: mask of the call was not kept" in capsys.readouterr().out


def test_names_that_a_terminal_would_obey_are_escaped(capsys):
    np.savez("a.npz", **{f"evil\x1b[2J\n\u202e/{n}": array for n, array in GOOD.items()})
    assert main(["diagnose", "a.npz", "--numerics", "flash"]) == 0
    out = capsys.readouterr().out
    assert "evil\\x1b[2J\\n\\u202e" in out
    assert all(line.isprintable() for line in out.splitlines())


@pytest.mark.parametrize("name", ["config.json", "out.json", ".out.json.tmp"])
def test_no_planted_link_is_followed(here, monkeypatch, name):
    """Nobody can foresee the temporary name, and a link at the final name is replaced."""
    mine = Path(text("mine", "mine"))
    for planted in (f"{name}.tmp", f".{name}.tmp", f"{name}~"):
        Path(planted).symlink_to(mine)
    files.write_json(Path(name), {"a": 1})
    assert mine.read_text() == "mine"
    assert json.loads(Path(name).read_text()) == {"a": 1}
    Path("link").symlink_to(mine)
    for write in (
        lambda path: files.write_atomically(path, b"x"),
        lambda path: files.append_line(path, "x"),
        files.lock,
    ):
        with pytest.raises((OSError, files.DiskError), match="a symbolic link stands there"):
            write(Path("link"))
    assert mine.read_text() == "mine"


def test_a_pipe_is_not_waited_for():
    os.mkfifo("pipe")
    with pytest.raises(files.DiskError, match="a device, pipe or socket stands there"):
        files.append_line(Path("pipe"), "x")


def test_json_is_strict_and_reads_back():
    files.write_json(Path("a.json"), {"val_loss": float("nan"), "b": [float("-inf"), 1.5]})
    found = json.loads(Path("a.json").read_text(), parse_constant=pytest.fail)
    assert found == {"val_loss": "nan", "b": ["-inf", 1.5]}
    assert np.isnan(files.read_record(Path("a.json"), val_loss=float)["val_loss"])


def test_a_field_is_unset_by_none(here, monkeypatch):
    from lowprec_attn.commands import config as configs

    flags = ["--config.optimizer.clip_norm=None", "--config.attention.kv_block=8"]
    made = configs.load("gpt2_bf16:tiny", [*flags, "--config.attention.kv_block=None"])
    assert made["optimizer"]["clip_norm"] is None
    assert made["attention"]["kv_block"] is None
    assert configs.load("gpt2_bf16:tiny", flags)["attention"]["kv_block"] == 8


@pytest.mark.parametrize("content", [b"id,text\n1,a\n", MIXED.encode()])
def test_a_share_of_1e_320_holds_something_out(content):
    argv = prepare("--val-fraction", "1e-320", content=content)()
    assert main(argv) == 0


# The machine


def test_a_deleted_working_directory_is_told(here, monkeypatch, capsys):
    (here / "gone").mkdir()
    monkeypatch.chdir(here / "gone")
    (here / "gone").rmdir()
    assert main(["report", "run"]) == 1
    assert "the current directory has been removed" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["diagnose", "a.npz", "--numerics", "flash"],
        ["check", "ours_on_import:f", "--causal"],
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_a_platform_without_its_device_is_told(words):
    npz()
    text("ours_on_import.py", "import jax\nONE = jax.numpy.ones(1)\ndef f(q, k, v): return q")
    environment = {**os.environ, "JAX_PLATFORMS": "cuda", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "lowprec_attn", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: JAX_PLATFORMS=cuda names a platform that is not here")


def test_the_environment_decides_neither_backend_nor_precision(monkeypatch, capsys):
    monkeypatch.setenv("MPLBACKEND", "no such backend")
    monkeypatch.setenv("JAX_ENABLE_X64", "1")
    main_module._settle_environment()
    assert os.environ["MPLBACKEND"] == "agg"
    assert "JAX_ENABLE_X64" not in os.environ
    assert "JAX_ENABLE_X64 is ignored" in capsys.readouterr().err


@pytest.mark.parametrize(("asked", "threads"), [(None, "1"), ("4", "4")])
def test_products_of_numpy_have_one_thread_unless_more_are_asked_for(monkeypatch, asked, threads):
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    if asked is not None:
        monkeypatch.setenv("OPENBLAS_NUM_THREADS", asked)
    main_module._settle_environment()
    assert os.environ["OPENBLAS_NUM_THREADS"] == threads


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device; mend that"),
        (OSError(errno.EMFILE, "Too many open files"), "Too many open files; mend that"),
        (MemoryError("3 TiB"), r"this machine's memory does not suffice \(3 TiB\)"),
        (RuntimeError("RESOURCE_EXHAUSTED: 3 TiB"), "the device's memory does not suffice"),
    ],
)
def test_what_the_machine_lacks_is_one_line(monkeypatch, capsys, error, words):
    from lowprec_attn.commands import report

    def run(args):
        raise error

    monkeypatch.setattr(report, "run", run)
    assert main(["report", "run"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(f"error: {words}", line)
    with pytest.raises(type(error)):
        main(["--debug", "report", "run"])


EXTRAS = (
    *("flax", "fsspec", "grain", "matplotlib", "ml_collections", "optax", "orbax", "tensorboardX"),
    *("tqdm", "datasets", "tiktoken", "safetensors", "tokenizers", "pyarrow"),
)


def test_help_needs_no_extra():
    """One process for all commands: it imports the package anew, without the extras' modules."""
    commands = [[name] for name in main_module._COMMANDS]
    commands += [["lab", action] for action in ("run", "collect", "report")]
    code = f"""
import sys
for name in {EXTRAS}: sys.modules[name] = None
from lowprec_attn.commands.main import main
for words in {commands}:
    try: main([*words, "--help"])
    except SystemExit as end: assert end.code == 0, words
    else: raise AssertionError(words)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_name_with_dollars_is_no_formula():
    from matplotlib.figure import Figure

    from lowprec_attn.runs.pages.drawing import plain, write_figure

    figure = Figure()
    figure.suptitle(plain(r"$\frac{ $x_$ and 3$"))
    write_figure(Path("a.png"), figure)
    assert Path("a.png").read_bytes().startswith(b"\x89PNG")
    assert figure.get_suptitle().replace(r"\$", "$") == r"$\frac{ $x_$ and 3$"


def test_credentials_are_not_recorded(monkeypatch):
    from lowprec_attn.runs import environment

    words = {
        "--config.data.path=s3://me:p@ss@host/text": "--config.data.path=s3://***@host/text",
        "https://host/a?token=abc&x=1": "https://host/a?token=***&x=1",
        "s3://AKIA:se/cr+et@host/text": "s3://***@host/text",
        "http://host:8080/a@b": "http://host:8080/a@b",
        "--token=two words": "--token=***",
        "https://host/?sv=1&sig=Zz": "https://host/?sv=1&sig=***",
        "--config.api_key=abc": "--config.api_key=***",
        "--hf-token": "--hf-token",
        "abc": "***",
        "WANDB_API_KEY=abc": "WANDB_API_KEY=***",
        "--config.model.vocab_size=257": "--config.model.vocab_size=257",
        "--workdir=gs://bucket/a@b": "--workdir=gs://bucket/a@b",
        "--tokenizer=bytes": "--tokenizer=bytes",
    }
    monkeypatch.setattr(sys, "argv", ["/home/me/train.py", *words])
    assert environment.describe()["command"] == ["train.py", *words.values()]


def test_standard_output_is_left_to_the_terminal_as_text(monkeypatch, capsys):
    from lowprec_attn.commands import report

    monkeypatch.setattr(report, "run", lambda args: print("a\x1b[2Jb\x07\tc\r\n\x9bd Ō"))
    with contextlib.redirect_stderr(io.StringIO()):
        assert main(["report", "run"]) == 0
    assert capsys.readouterr().out == "a\\x1b[2Jb\\x07\tc\\r\n\\x9bd Ō\n"
