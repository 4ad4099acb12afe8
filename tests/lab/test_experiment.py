"""The definition of an experiment: its arms, and the settings that reach the trainer."""

import pytest
from command import ROOT

from lowprec_attn.commands import config
from lowprec_attn.lab import experiment
from lowprec_attn.runs.instability.explosion import RunawayRule
from lowprec_attn.training.config import train_settings

FIRST_SIGHT = ROOT / "configs" / "first_sight.toml"


@pytest.mark.parametrize(
    ("fields", "titles"),
    [
        (1, {"a": "exact", "b": "field_number_0=value"}),
        (4, {"a": "exact", "b": ",\n".join(f"field_number_{i}=value" for i in range(4))}),
        (5, {"a": "a", "b": "b"}),
    ],
)
def test_arms_with_long_titles_are_called_by_name_above_their_panels(fields, titles):
    overrides = {f"x.field_number_{i}": "value" for i in range(fields)}
    arms = [experiment.Arm("a", {"attention.numerics": "exact"}), experiment.Arm("b", overrides)]
    assert experiment.panel_titles([*arms, arms[0]]) == titles


def test_no_title_breaks_a_word():
    arms = [
        experiment.Arm(name, {"attention.points.output_bwd": f"bf16_m2:{mode}"})
        for name, mode in (("a", "nearest"), ("b", "error_random_sign"))
    ]
    assert experiment.panel_titles(arms) == {"a": "a", "b": "b"}


def settings_of(trial, defined):
    """The settings that the trainer derives from a run's arguments."""
    name, *fields = defined.arguments(trial)
    return train_settings(config.load(name.removeprefix("--config="), fields))


def test_the_arms_of_first_sight_differ_in_their_arithmetic_alone(monkeypatch):
    monkeypatch.chdir(ROOT)
    defined = experiment.load(FIRST_SIGHT)
    arms = {trial.name: settings_of(trial, defined) for trial in defined.trials}
    heads = {name: settings.attention.layers[0][0] for name, settings in arms.items()}
    assert len(set(heads.values())) == len(arms) == 8
    for settings in arms.values():
        assert settings.attention.implementation == "gpu"
        assert settings.batch_size * settings.model.context == 32_768
        groups = [group for layer in settings.attention.layers for group in layer]
        assert {group.numerics.kv_block for group in groups} == {128}
    rest = [
        {k: v for k, v in vars(settings).items() if k != "attention"} for settings in arms.values()
    ]
    assert all(other == rest[0] for other in rest)
    changed = heads["probe_float32_pv_saved"].numerics
    assert (str(changed.pv), str(changed.saved_output)) == ("float32", "float32")
    assert changed.replace(pv="bfloat16", saved_output="same") == heads["probe"].numerics


@pytest.mark.parametrize(
    "path",
    sorted(
        path
        for path in [*ROOT.glob("configs/*.toml"), *ROOT.glob("results/*/**/*.toml")]
        if path.name != "titles.toml"
    ),
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_every_definition_of_the_repository_makes_different_settings(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    defined = experiment.load(path)
    defined = defined.with_seeds(defined.seeds[:1])
    settings = [settings_of(trial, defined) for trial in defined.trials]
    assert all(a != b for i, a in enumerate(settings) for b in settings[:i])


def test_flags_reach_every_arm_but_not_what_distinguishes_them():
    defined = experiment.load(FIRST_SIGHT).with_flags(
        ["--config.steps=7", "--config.data.path=a=b"]
    )
    for trial in defined.trials:
        assert "--config.steps=7" in defined.arguments(trial)
        assert "--config.data.path=a=b" in defined.arguments(trial)
        assert "--config.steps=3500" not in defined.arguments(trial)
    with pytest.raises(experiment.ExperimentError, match="arm probe sets it"):
        defined.with_flags(["--config.attention.numerics=exact"])
    with pytest.raises(experiment.ExperimentError, match=r"'--config\.steps' is not"):
        defined.with_flags(["--config.steps"])
    with pytest.raises(experiment.ExperimentError, match="no arm 'flahs'; arms are probe, "):
        defined.select(["flahs"])


def test_a_title_says_what_an_arm_computes():
    titles = [arm.title for arm in experiment.load(FIRST_SIGHT).arms]
    assert titles[0] == "probe"
    assert "probe, pv=float32, saved_output=float32" in titles
    assert experiment.Arm("base", {}).title == "base"
    named = {"name": "nanogpt_flash", "attention.numerics": "flash"}
    assert experiment.Arm("flash", named).title == "nanogpt_flash"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("config = ", "not TOML"),
        ("[arms.a]", "config must name a file, got None"),
        ("config = 'c.py'", "no arms"),
        ("config = 'c.py'\nsteps = 3\n[arms.a]", "unknown field steps"),
        ("config = 'c.py'\n[arms.'a/b']", "'a/b'"),
        ("config = 'c.py'\n[arms]\na = 3", "a must be a table of fields, got 3"),
        ("config = 'c.py'\n[arms.a]\nx.y = [1]", r"arms.a.x.y must be .* got \[1\]"),
        ("config = 'c.py'\nseeds = 3\n[arms.a]", "seeds must be a list of whole numbers, got 3"),
        ("config = 'c.py'\nseeds = [1.0]\n[arms.a]", r"whole numbers, got \[1.0\]"),
        ("config = 'c.py'\nseeds = [true]\n[arms.a]", r"whole numbers, got \[True\]"),
        ("config = 'c.py'\nseeds = [1, 1]\n[arms.a]", r"arms.toml: seeds must be diff.* \[1, 1\]"),
        ("config = 'c.py'\nseeds = [-1]\n[arms.a]", r"from 0 to 4294967295, got \[-1\]"),
        ("config = 'c.py'\nseeds = [4294967296]\n[arms.a]", r"got \[4294967296\]"),
        ("a = " + "[" * 10_000, "not TOML"),
        ("config = 'c.py'\n[arms.a." + ".".join("b" * 3000) + "]\nx = 1", "arms.a has too many"),
        ("config = 'c.py'\nsead = 3\n[arms.a]", r"field sead \(did you mean seeds\?\)"),
        ("config = 'c.py'\nseeds = [1]\nshared.seed = 1\n[arms.a]", "set in every arm"),
        ("config = 'c.py'\nseeds = [1]\n[arms.a]\nseed = 2", "arm a sets seed"),
        (
            "config = 'c.py'\npositive_control = 'c'\n[arms.a]\n[arms.b]",
            r"positive_control must be an arm \(a, b\), got 'c'",
        ),
        ("config = 'c.py'\nnegative_control = ['a']\n[arms.a]", r"negative_control .*\['a'\]"),
        (
            "config = 'c.py'\npositive_control = 'a'\nnegative_control = 'a'\n[arms.a]",
            "arm a cannot be both controls",
        ),
        ("config = 'c.py'\n[runaway]\nsteps = 3\n[arms.a]", r"steps \(did you mean step\?\)"),
        ("config = 'c.py'\n[runaway]\nstep = 1.5\n[arms.a]", "step must be a whole .* got 1.5"),
        ("config = 'c.py'\n[runaway]\nscore = -1\n[arms.a]", "score must be a number, 0 .* got -1"),
        ("config = 'c.py'\n[runaway]\nscore = nan\n[arms.a]", "score must be .* got nan"),
        ("config = 'c.py'\n[runaway]\nstep = true\n[arms.a]", "step must be .* got True"),
        ("config = 'c.py'\nrunaway = 3\n[arms.a]", "runaway must be a table"),
    ],
)
def test_a_wrong_definition_is_told_in_one_line(tmp_path, text, message):
    path = tmp_path / "arms.toml"
    path.write_text(text)
    with pytest.raises(experiment.ExperimentError, match=message) as error:
        experiment.load(path)
    assert "\n" not in str(error.value)


SEEDS = """
config = "c.py"
seeds = [3, 1]
positive_control = "b"
negative_control = "a"
[arms.a]
[arms.b]
x = 1
[arms.c]
"""


@pytest.fixture
def seeded(tmp_path):
    """An experiment of three arms, two of them controls, and two seeds."""
    path = tmp_path / "arms.toml"
    path.write_text(SEEDS)
    return experiment.load(path)


def test_arms_run_seed_by_seed(seeded):
    names = [trial.name for trial in seeded.trials]
    assert names == ["a-seed3", "b-seed3", "c-seed3", "a-seed1", "b-seed1", "c-seed1"]
    arguments = seeded.arguments(seeded.trials[4])
    assert arguments == ["--config=c.py", "--config.x=1", "--config.seed=1"]


def test_a_field_may_name_the_seed(seeded):
    resumed = seeded.with_flags(["--config.resume_from=runs/b-seed{seed}"])
    paths = {trial.seed: resumed.arguments(trial)[1] for trial in resumed.trials}
    assert paths == {
        1: "--config.resume_from=runs/b-seed1",
        3: "--config.resume_from=runs/b-seed3",
    }


def test_without_seeds_a_run_has_the_name_of_its_arm_and_the_seed_of_its_config(seeded):
    (trial, *_) = seeded.with_seeds([]).trials
    assert (trial.name, trial.seed) == ("a", None)
    assert seeded.with_seeds([]).arguments(trial) == ["--config=c.py"]


def test_controls_are_arms(seeded):
    assert [arm.control for arm in seeded.arms] == ["negative", "positive", None]
    assert [arm.control for arm in seeded.select(["c", "b"]).arms] == ["positive", None]


def test_when_scores_are_judged_may_be_said(seeded, tmp_path):
    assert seeded.runaway == RunawayRule(512, 2000)
    path = tmp_path / "short.toml"
    path.write_text(f"{SEEDS}[runaway]\nstep = 300\nscore = 64.5\n")
    assert experiment.load(path).with_seeds([1]).runaway == RunawayRule(64.5, 300)
    path.write_text(f"{SEEDS}[runaway]\nstep = 300\n")
    assert experiment.load(path).runaway == RunawayRule(512, 300)


def test_seeds_are_given_once(seeded):
    assert [trial.seed for trial in seeded.with_seeds([7]).trials] == [7, 7, 7]
    one = pytest.raises(experiment.ExperimentError, match=r"--config.seed\), and seeds as well")
    with one:
        seeded.with_flags(["--config.seed=5"])
    flagged = seeded.with_seeds([]).with_flags(["--config.seed=5"])
    assert "--config.seed=5" in flagged.arguments(flagged.trials[0])
    with one:
        flagged.with_seeds([1])
    for seeds in ([1, 1], [-1]):
        with pytest.raises(experiment.ExperimentError, match="must be different whole numbers"):
            seeded.with_seeds(seeds)
