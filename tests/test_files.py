"""Writing files, reading lines, locks, and a disk that refuses a write."""

import resource

import pytest

from lowprec_attn import files
from lowprec_attn.files import DiskError, NotJsonError


def test_write_errors_name_the_path(tmp_path):
    path = tmp_path / "file" / "below"
    (tmp_path / "file").touch()
    with (
        pytest.raises(DiskError, match=r"cannot write .*below: Not a directory"),
        files.writing(path),
    ):
        path.write_text("")
    with pytest.raises(DiskError, match=r"cannot write .*below: Not a directory"):
        files.append_line(path, "")


def test_what_is_not_json_is_named(tmp_path):
    files.write_json(tmp_path / "a.json", {"a": [1]})
    assert files.read_json(tmp_path / "a.json") == {"a": [1]}
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(NotJsonError, match=r"a\.json is not JSON"):
        files.read_json(tmp_path / "a.json")


def test_a_cut_off_line_does_not_count(tmp_path):
    path = tmp_path / "lines"
    files.append_line(path, "a")
    files.append_line(path, "ü")
    assert files.complete_lines(path) == [b"a\n", "ü\n".encode()]
    with path.open("ab") as file:
        file.write(b"half")
    assert files.complete_lines(path) == [b"a\n", "ü\n".encode()]
    path.write_bytes(b"half")
    assert files.complete_lines(path) == []


def test_a_line_that_a_full_disk_cut_off_is_not_joined_to_the_next(tmp_path):
    path = tmp_path / "lines"
    files.append_line(path, "a")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5, limits[1]))
    try:
        with pytest.raises(DiskError, match="No space left on device"):
            files.append_line(path, "cut off")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    files.append_line(path, "b")
    assert path.read_bytes() == b"a\nb\n"


def test_a_lock_holds_until_it_is_closed(tmp_path):
    lock = files.lock(tmp_path / "lock")
    assert lock is not None
    with lock:
        assert files.lock(tmp_path / "lock") is None
    again = files.lock(tmp_path / "lock")
    assert again is not None
    again.close()


def test_nested_mappings_are_flattened_to_their_values():
    nested = {"a": {"b": 1, "c": {}}, "d": [2, {"e": 3}]}
    assert dict(files.flatten(nested)) == {"a.b": 1, "a.c": {}, "d": [2, {"e": 3}]}
    flat = {"a/b": 1, "a/c": {}, "d/0": 2, "d/1/e": 3}
    assert dict(files.flatten(nested, "/", lists=True)) == flat


def test_the_sum_of_a_file_is_that_of_its_bytes(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")  # FIPS 180-4's example of SHA-256
    assert files.sha256(tmp_path / "a") == (
        "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "holds list, no record"),
        ("{}", "is no record with a loss: it has None"),
        ('{"loss": "2"}', "is no record with a loss: it has '2'"),
    ],
)
def test_a_record_has_its_fields(tmp_path, text, words):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(files.NotJsonError, match=rf"^{path} {words}.*; restore it from a copy, or"):
        files.read_record(path, loss=float)
    path.write_text('{"loss": 2}')
    assert files.read_record(path, loss=float) == {"loss": 2}
