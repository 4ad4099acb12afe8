"""Files that are written, and a disk that refuses."""

import pytest

from lowprec_attn import files
from lowprec_attn.files import DiskError


def test_write_errors_name_the_path(tmp_path):
    path = tmp_path / "file" / "below"
    (tmp_path / "file").touch()
    with (
        pytest.raises(DiskError, match=r"cannot write .*below: Not a directory"),
        files.writing(path),
    ):
        path.write_text("")
