"""`lab run` with a stand-in for the trainer."""

import subprocess
import sys

import pytest
from command import ROOT
from processes.stand_in import STAND_IN

from lowprec_attn.commands.main import main
from lowprec_attn.lab import runner


@pytest.fixture
def lab(tmp_path, monkeypatch, capsys):
    """`lab(acts, *options, head="")` runs one stand-in per act, named by its key: (code, output).

    `head` is placed above the arms in the definition.
    """
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "unused")
    definition, trainer, out = tmp_path / "arms.toml", tmp_path / "stand_in.py", tmp_path / "out"
    trainer.write_text(STAND_IN)
    stand_in = (sys.executable, str(trainer))
    monkeypatch.setattr(runner, "TRAIN", stand_in)
    code = (
        "import sys; from lowprec_attn.lab import runner; from lowprec_attn.commands.main import "
        f"main; runner.TRAIN = {stand_in!r}; sys.exit(main(sys.argv[1:]))"
    )

    def words(acts, *options, head=""):
        arms = "".join(f"[arms.{name}]\nact = '{act}'\n" for name, act in acts.items())
        definition.write_text(f"config = 'some.py'\n{head}\n{arms}")
        words = ["lab", "run", definition, "--workdir", out, *options]
        return [str(word) for word in words]

    def run(acts, *options, head=""):
        code = main(words(acts, *(options or ("--jobs", 2)), head=head))
        return code, "".join(capsys.readouterr())

    def start(acts, *options):
        command = [sys.executable, "-c", code, *words(acts, *options)]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )

    run.out, run.start = out, start
    return run
