"""`lowprec-attn prepare` makes token files that load."""

import argparse
import json
import re
import resource
import sys

import numpy as np
import pytest

from lowprec_attn import installation
from lowprec_attn.commands import prepare as command
from lowprec_attn.data import documents, tokens
from lowprec_attn.data.tokens import DataError
from lowprec_attn.files import DiskError


def run(*arguments):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    command.run(parser.parse_args([str(a) for a in arguments]))


def byte_documents(ids):
    """The texts between end-of-text ids; checks that the last id is one."""
    assert ids[-1] == 256
    ends = np.flatnonzero(ids == 256)
    return [bytes(part[part < 256].astype(np.uint8)).decode() for part in np.split(ids, ends)[:-1]]


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


@pytest.fixture
def files(tmp_path):
    """Twenty short documents."""
    paths = [tmp_path / f"{i:02}.txt" for i in range(20)]
    for i, path in enumerate(paths):
        path.write_bytes(f"text {i}\r\nwith é\n".encode())
    return paths


@pytest.fixture
def line(tmp_path):
    """A document of one line, which cannot be split."""
    path = tmp_path / "line.txt"
    path.write_text("a single line\n")
    return path


def test_every_document_lands_in_one_split(out, files, capsys):
    run(out, "--text", *files, "--tokenizer", "bytes", "--val-fraction", "0.2")
    assert sorted(p.name for p in out.iterdir()) == ["meta.json", "train.bin", "val.bin"]
    corpus = tokens.load(out)
    train, val = byte_documents(corpus.train.ids), byte_documents(corpus.val.ids)
    assert (len(train), len(val)) == (16, 4)
    assert sorted(train + val) == sorted(path.read_bytes().decode() for path in files)
    assert train == [t for t in (path.read_bytes().decode() for path in files) if t in train]
    assert (corpus.train.tokenizer, corpus.train.vocabulary) == ("bytes", 257)
    printed = capsys.readouterr().out
    assert f"wrote {out / 'train.bin'}: {corpus.train.count:,} tokens" in printed
    assert f"lowprec-attn train --config=gpt2_bf16 --config.data.path={out}" in printed


def test_the_seed_chooses_what_is_held_out(tmp_path, files):
    def held_out(name, seed):
        arguments = ("--tokenizer", "bytes", "--val-fraction", "0.1", "--seed", seed)
        run(tmp_path / name, "--text", *files, *arguments)
        return byte_documents(tokens.load(tmp_path / name).val.ids)

    assert held_out("a", 0) == held_out("b", 0)
    assert len({tuple(held_out(f"seed{seed}", seed)) for seed in range(8)}) > 2


def test_one_long_document_is_held_out_in_pieces(out, tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "_PIECE", 100)
    lines = [f"line {i:04}\n" for i in range(1000)]
    (tmp_path / "book.txt").write_text("".join(lines))
    run(out, "--text", tmp_path / "book.txt", "--tokenizer", "bytes")
    corpus = tokens.load(out)
    (train,), (val,) = byte_documents(corpus.train.ids), byte_documents(corpus.val.ids)
    assert 0.03 < len(val) / len(train) < 0.08
    kept = train.splitlines(keepends=True)
    assert kept == sorted(kept)
    assert sorted(kept + val.splitlines(keepends=True)) == lines


def test_data_set_by_the_real_loader(out, tmp_path):
    (tmp_path / "rows.txt").write_text("".join(f"row {i}\n\n" for i in range(30)))
    arguments = ("--data-files", tmp_path / "rows.txt", "--tokenizer", "bytes")
    run(out, "--dataset", "text", *arguments, "--val-fraction", "0.1")
    corpus = tokens.load(out)
    found = byte_documents(corpus.train.ids) + byte_documents(corpus.val.ids)
    assert sorted(found) == sorted(f"row {i}" for i in range(30))


def test_existing_files_are_replaced_only_when_asked(out, files):
    arguments = (out, "--text", *files, "--tokenizer", "bytes")
    run(*arguments)
    before = (out / "train.bin").read_bytes()
    files[0].write_text("other text")
    with pytest.raises(DataError, match=r"meta.json exists: give another directory, or --over"):
        run(*arguments)
    assert (out / "train.bin").read_bytes() == before
    run(*arguments, "--overwrite")
    assert b"o\0t\0h\0e\0r\0" in (out / "train.bin").read_bytes()
    tokens.load(out)


def test_a_failure_leaves_the_old_files_alone(out, files):
    run(out, "--text", *files, "--tokenizer", "bytes")
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    files[-1].write_bytes(b"caf\xe9")
    with pytest.raises(DataError, match=r"19.txt is not UTF-8 \(byte 0xe9\): convert it"):
        run(out, "--text", *files, "--tokenizer", "bytes", "--overwrite")
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before


def test_a_full_disk_is_one_line_and_leaves_nothing(out, tmp_path):
    text = tmp_path / "big.txt"
    text.write_text("some text\n" * 50_000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(DiskError, match=rf"cannot write {out}: .*; free space there"):
            run(out, "--text", text, "--tokenizer", "bytes", "--val-fraction", "0.5")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not out.exists()


def test_an_output_that_is_a_file(tmp_path, files):
    with pytest.raises(DiskError, match=r"cannot write .*00.txt"):
        run(files[0], "--text", files[1], "--tokenizer", "bytes")
    assert files[0].read_text().startswith("text 0")


@pytest.mark.parametrize(("fraction", "name"), [("0.05", "val"), ("0.99", "train")])
def test_too_little_text_to_hold_out(out, line, fraction, name):
    with pytest.raises(DataError, match=rf"{name}.bin would be empty: the text has 1 document "):
        run(out / "deeper", "--text", line, "--tokenizer", "bytes", "--val-fraction", fraction)
    assert not out.exists()


def test_what_was_there_before_a_failure_stays(out, line):
    out.mkdir()
    with pytest.raises(DataError, match="would be empty"):
        run(out, "--text", line, "--tokenizer", "bytes")
    assert list(out.iterdir()) == []


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("fraction", [0.001, 0.05, 0.5, 0.97])
@pytest.mark.parametrize("count", [2, 3])
def test_files_of_one_line_each_are_in_both_splits(out, tmp_path, count, fraction, seed):
    paths = [tmp_path / f"{number}.txt" for number in range(count)]
    for path in paths:
        path.write_text(path.stem)  # without a newline at its end
    options = ("--tokenizer", "bytes", "--val-fraction", fraction, "--seed", seed)
    run(out, "--text", *paths, *options)
    corpus = tokens.load(out)
    train, val = byte_documents(corpus.train.ids), byte_documents(corpus.val.ids)
    assert sorted(train + val) == [path.stem for path in paths]
    if fraction < 0.5:
        assert len(val) == 1


@pytest.mark.parametrize("fraction", [0.05, 0.3, 0.97])
def test_three_small_files_are_cut_so_that_a_part_can_be_held_out(out, tmp_path, fraction):
    paths = [tmp_path / f"{name}.txt" for name in "abc"]
    for path in paths:
        path.write_text("".join(f"{path.stem}: line {i:03}\n" for i in range(100)))
    run(out, "--text", *paths, "--tokenizer", "bytes", "--val-fraction", fraction)
    corpus = tokens.load(out)
    share = corpus.val.count / (corpus.train.count + corpus.val.count)
    assert share == pytest.approx(fraction, abs=0.04)
    texts = "".join(byte_documents(corpus.train.ids) + byte_documents(corpus.val.ids))
    assert sorted(texts.splitlines()) == [f"{n}: line {i:03}" for n in "abc" for i in range(100)]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--val-fraction", "0"], r"--val-fraction 0.0 is not between 0 and 1"),
        (["--val-fraction", "1"], r"--val-fraction 1.0 is not between 0 and 1"),
        (["--val-fraction", "nan"], r"--val-fraction nan is not between 0 and 1"),
        (["--seed", "-1"], r"--seed -1 is negative: give 0 or more"),
        (["--data-files", "a"], r"--data-files only goes with --dataset"),
        (["--revision", "a"], r"--revision only goes with --dataset"),
    ],
)
def test_arguments_that_contradict_each_other(out, files, extra, message):
    with pytest.raises(DataError, match=message):
        run(out, "--text", files[0], *extra)
    assert not out.exists()


def test_missing_text_file(out, files):
    with pytest.raises(DataError, match=r"text file .* is no file: check the path"):
        run(out, "--text", out.parent, "--tokenizer", "bytes")
    with pytest.raises(DataError, match=r"text file nowhere.txt does not exist"):
        run(out, "--text", files[0], "nowhere.txt", "--tokenizer", "bytes")
    assert not out.exists()


def test_missing_data_file(out, tmp_path):
    with pytest.raises(DataError, match=r"cannot load the data set 'text' \(.*nowhere.txt"):
        run(out, "--dataset", "text", "--data-files", tmp_path / "nowhere.txt", "--tokenizer=bytes")


def test_data_set_without_a_text_column(out, tmp_path):
    (tmp_path / "rows.json").write_text(json.dumps({"body": "x"}) + "\n")
    with pytest.raises(DataError, match=r"'json' has the columns \['body'\], but no 'text'"):
        run(out, "--dataset", "json", "--data-files", tmp_path / "rows.json", "--tokenizer=bytes")


def test_data_set_that_needs_a_loading_script(monkeypatch):
    import datasets

    def refuse(*_, **__):
        raise RuntimeError("Dataset scripts are no longer supported, but found openwebtext.py")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(DataError, match=r"'openwebtext' .*: try --revision refs/convert/parquet"):
        documents.dataset("openwebtext")


def test_data_set_that_breaks_off(monkeypatch):
    import datasets

    def rows():
        yield {"text": "a"}
        raise ConnectionError("gone")

    class Rows:
        info = datasets.DatasetInfo()

        def __iter__(self):
            return rows()

    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: Rows())
    with pytest.raises(DataError, match=r"reading the data set 'x' failed \(gone\): start again"):
        list(documents.dataset("x").pieces)


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("tqdm", ["--text", "{file}", "--tokenizer", "bytes"]),
        ("datasets", ["--dataset", "text", "--tokenizer", "bytes"]),
        ("tiktoken", ["--text", "{file}"]),
    ],
)
def test_missing_packages_are_named(out, files, monkeypatch, module, arguments):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DataError, match=re.escape(f"{module}: {installation.command('data')}")):
        run(out, *(a.format(file=files[0]) for a in arguments))
