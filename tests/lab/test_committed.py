"""The tables and figures of `results/` that texts rely on, checked against the records."""

import functools
import hashlib
import itertools
import re
import shutil
import tomllib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from command import ROOT
from matplotlib.figure import Figure
from PIL import Image

from benchmarks import causes_figure, front_figure
from lowprec_attn.commands.main import main
from lowprec_attn.data.order import SeededOrder
from lowprec_attn.lab import RECORDS, archive, records
from lowprec_attn.lab.report import figures, outcomes

RESULTS = ROOT / "results"
FAILURE = RESULTS / "failure"
CONTROLS = ("--positive-control", "published_lse_bf16", "--negative-control", "exact")


OPTIONS = {"lse_rounding": CONTROLS, "laptop": ("--layer", "0")}
EXPERIMENTS = sorted(
    str(path.parent.relative_to(RESULTS)) for path in RESULTS.rglob("table.md") if path.is_file()
)


def _two_digits(value: float) -> str:
    return f"{float(f'{value:.2g}'):,g}"


@pytest.fixture(scope="module", autouse=True)
def _records_are_read_once():
    """Keeps some archives in memory, because several pages show numbers of the same records."""
    read = functools.lru_cache(maxsize=6)(records.read_all)
    with pytest.MonkeyPatch.context() as patch:
        for module in (records, causes_figure, front_figure):
            patch.setattr(module, "read_all", lambda directory: list(read(directory)))
        yield


@pytest.fixture
def reported(tmp_path, monkeypatch):
    """`reported(name)`: the path of a copy of an experiment, with its tables written anew."""
    for name in ("score_figure", "loss_figure"):
        monkeypatch.setattr(figures, name, lambda *_: Figure())
    shutil.copy(RESULTS / "texts.toml", tmp_path)

    def report(name):
        kept = shutil.ignore_patterns("*.md", "*.png")
        copy = shutil.copytree(RESULTS / name, tmp_path / (RESULTS / name).name, ignore=kept)
        assert main(["lab", "report", str(copy), *OPTIONS.get(name, ())]) == 0
        return copy

    return report


def test_every_experiment_has_records_and_a_table():
    assert len(EXPERIMENTS) > 50
    without = [name for name in EXPERIMENTS if not (RESULTS / name / RECORDS).exists()]
    assert without == []
    assert not list(RESULTS.rglob("*-seed*.jsonl"))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_table_of_an_experiment_is_that_of_its_records(reported, name):
    table = reported(name) / "table.md"
    assert table.read_text() == (RESULTS / name / "table.md").read_text()


@pytest.mark.parametrize("name", ["first_sight", "lse_rounding"])
def test_a_page_shows_the_table_of_the_records(name):
    table = (RESULTS / name / "table.md").read_text()
    first = next(part for part in table.split("\n\n") if part[0] == "|")
    assert first.rstrip() in (RESULTS / name / "README.md").read_text()


@pytest.mark.slow
def test_the_summary_of_the_failure_is_that_of_the_records(reported):
    copy = reported("failure")
    assert (copy / "summary.md").read_text() == (FAILURE / "summary.md").read_text()


def test_the_page_of_the_first_batch_in_true_bfloat16_has_what_the_records_have():
    """For the head of layer 1 with the largest score, at the end of each run."""
    directory = RESULTS / "true_bfloat16" / "arithmetic"
    page = (directory / "README.md").read_text()
    cells = {}
    for run in records.read_all(directory):
        at = run.signals[2500][1] if 2500 in run.signals else None
        row = cells.setdefault(run.arm.name, ([], [], []))
        if at is None:
            values = ("–", "–", "–")
        else:
            scores = at["score_maximum"]
            error = at["query_weight_gradient_error_from_total"][int(np.argmax(scores))]
            large = sum(score > 512 for score in scores)
            values = (f"{max(scores):,.0f}", str(large), f"{error:.2g}")
        for column, value in zip(row, values, strict=True):
            column.append(value)
    for name, columns in cells.items():
        (line,) = re.findall(rf"^\| `{name}`.*$", page, re.MULTILINE)
        said = [cell.strip().split(", ") for cell in line.split("|")[2:5]]
        assert said == [*columns], name


def test_the_page_of_the_causes_in_true_bfloat16_has_what_the_records_have():
    """The scores of each seed at the last record, and the largest error from step 1,000 on."""
    page = (RESULTS / "true_bfloat16" / "causes" / "README.md").read_text()
    of_arm = {}
    for run in causes_figure.runs():
        of_arm.setdefault(run.arm.name, []).append(run)
    rows = re.findall(r"^\| `(\w+)`([^|]*)\|([^|]*)\|([^|]*)\|([^|]*)\|$", page, re.MULTILINE)
    assert {name for name, *_ in rows} == set(of_arm)
    for name, _, scores, heads, errors in rows:
        said = zip(*(cells.strip().split(", ") for cells in (scores, heads, errors)), strict=True)
        for seed, (score, large, error) in enumerate(said, start=1):
            runs = [run for run in of_arm[name] if run.seed == seed]
            if score == "–":
                assert not runs, (name, seed)
                continue
            run = runs[0]  # the run of the first batch, if there are two
            step = max(run.signals)
            at = f"{causes_figure.last_score(run):,.0f}" + (f" ({step:,})" if step < 2500 else "")
            assert score.removesuffix(" (batch 1)") == at, (name, seed)
            found = sum(s > 512 for s in run.signals[step][causes_figure.LAYER]["score_maximum"])
            assert large == str(found), (name, seed)
            assert error == _two_digits(causes_figure.largest_error(run)), (name, seed)


def test_a_rounding_between_δ_and_its_sum_decides_every_run_in_true_bfloat16():
    rounded = {row.arm for row in causes_figure.ROUNDED}
    errors = [
        (run.arm.name in rounded, causes_figure.largest_error(run)) for run in causes_figure.runs()
    ]
    broken = [error for of_rounded, error in errors if of_rounded]
    held = [error for of_rounded, error in errors if not of_rounded]
    assert (len(broken), len(held)) == (31, 20)
    assert min(broken) > 1.1 > 0.24 > max(held)


def test_the_separation_is_no_matter_of_how_it_is_measured():
    """It also holds at the last record, as an RMS, and in absolute size, as the page says."""
    rounded = {row.arm for row in causes_figure.ROUNDED}
    found = {True: [], False: []}
    for run in causes_figure.runs():
        at = [of[causes_figure.LAYER] for step, of in run.signals.items() if step >= 1000]
        true = np.array([of["query_weight_gradient_exact"] for of in at])
        errors = np.array([of["query_weight_gradient_error_from_total"] for of in at])
        absolute = np.max(errors * true)
        errors = np.where(true > causes_figure.LEAST_GRADIENT, errors, 0)
        rms = np.sqrt(np.mean(errors**2, axis=1)).max()
        found[run.arm.name in rounded].append((errors[-1].max(), rms, absolute))
    least, most = np.min(found[True], axis=0), np.max(found[False], axis=0)
    np.testing.assert_array_equal([f"{x:.2g}" for x in least], ["0.92", "0.33", "0.0015"])
    np.testing.assert_array_equal([f"{x:.2g}" for x in most], ["0.24", "0.071", "0.00039"])


@pytest.mark.parametrize(
    ("name", "held", "validated_at", "behind_from"),
    [("long", "normalized_delta", 7000, 3500), ("long_h200", "exact", 8000, 4500)],
)
def test_the_page_of_long_runs_has_what_the_records_have(name, held, validated_at, behind_from):
    page = (RESULTS / "true_bfloat16" / name / "README.md").read_text()
    runs = records.read_all(RESULTS / "true_bfloat16" / name)
    cells = {}
    for run in runs:
        step = max(run.signals)
        scores = run.signals[step][causes_figure.LAYER]["score_maximum"]
        values = (
            "–" if run.explosion is None else f"{run.explosion:,}",
            f"{max(scores):,.0f}",
            str(sum(score > 512 for score in scores)),
            _two_digits(causes_figure.largest_error(run)),
            f"{run.val_losses[validated_at]:.3f}",
        )
        columns = cells.setdefault(run.arm.name, ([], [], [], [], []))
        for column, value in zip(columns, values, strict=True):
            column.append(value)
    assert {"flash", held} <= set(cells)
    for arm, columns in cells.items():
        (line,) = re.findall(rf"^\| `{arm}`.*$", page, re.MULTILINE)
        assert [cell.strip().split(", ") for cell in line.split("|")[2:7]] == [*columns], arm

    above = {
        run.seed: dict(zip(steps, means, strict=True))
        for run, steps, means in front_figure.losses_above(runs, "flash", held)
    }
    rows = re.findall(r"^\| step ([\d,]+) \| (.+) \|$", page, re.MULTILINE)
    assert len(rows) >= 6
    for step, said in rows:
        means = [above[seed][int(step.replace(",", ""))] for seed in (1, 2, 3)]
        assert said.replace("−", "-").split(" | ") == [f"{mean:+.4f}" for mean in means]
    # From then on, the loss is behind at every record with all three seeds.
    late = [mean for of in above.values() for step, mean in of.items() if step >= behind_from]
    assert min(late) > 0


def test_the_loss_with_float32_output_stays_that_of_exact():
    page = (RESULTS / "true_bfloat16" / "long_h200" / "README.md").read_text()
    runs = records.read_all(RESULTS / "true_bfloat16" / "long_h200")
    for arm, name in (("float32_output", "O in float32"), ("matched", "The cure, `matched`")):
        (line,) = re.findall(rf"^\| {name} \|(.*)\|$", page, re.MULTILINE)
        said = [cell.strip().replace("−", "-") for cell in line.split("|")]
        above = front_figure.losses_above(runs, arm, "exact")
        for cell, (_, steps, means) in zip(said, above, strict=True):
            of = dict(zip(steps, means, strict=True))
            late = [mean for step, mean in of.items() if step >= 2500]
            assert cell == f"{min(late):.4f} to {max(late):.4f}; {of[8500]:+.4f}"
            assert max(late) < 0.006
    # The only other run of this length, for comparison.
    third = {run.arm.name: run.losses for run in runs if run.seed == 3}
    steps = [step for step in third["matched"] if step % 10 == 0]
    behind = {step: third["float32_output"][step] - third["matched"][step] for step in steps}
    ends = [end for end in steps if end >= 9000]
    means = [np.mean([behind[s] for s in steps if end - 500 < s <= end]) for end in ends]
    assert 0.002 < min(means) < max(means) < 0.009


_CUT = ("–",) * 5


def _cells(run: records.ArmRecord) -> tuple[str, ...]:
    """The cells of a run in the tables of isolation, δ and recipes, at its last record to 2,500."""
    layer, steps = causes_figure.LAYER, [step for step in run.signals if step <= 2500]
    step = max(steps)
    scores = [of["score_maximum"] for of in run.signals[step]]
    return (
        f"{max(scores[layer]):,.0f}" + (f" ({step:,})" if step < 2500 else ""),
        f"{max(max(of) for i, of in enumerate(scores) if i != layer):,.0f}",
        str(sum(score > 512 for of in scores for score in of)),
        _two_digits(
            causes_figure.largest_error(run, [s for s in steps if s >= causes_figure.FIRST_STEP])
        ),
    )


def _row(run: records.ArmRecord) -> tuple[str, ...]:
    """The cells of a run in the isolation table."""
    if 2500 not in run.signals:
        return _CUT
    return (*_cells(run), f"{run.val_losses[2500]:.3f}")


def _error_of_delta(run: records.ArmRecord, step: int = 2500) -> float:
    """The norm of what δ's error causes in W_Q's gradient, in the worst head of the layer."""
    of = run.signals[step][causes_figure.LAYER]
    true = np.array(of["query_weight_gradient_exact"])
    return float(np.max(true * np.array(of["query_weight_gradient_error_from_delta"])))


def _error_cell(run: records.ArmRecord) -> str:
    return f"{float(f'{_error_of_delta(run):.2g}'):g}"


def test_the_page_of_an_error_of_delta_has_what_the_records_have():
    directory = RESULTS / "true_bfloat16"
    page = (directory / "delta" / "README.md").read_text()
    runs = records.read_all(directory / "delta")
    rows = dict(re.findall(r"^\| (?:beside [^`]*)?`(\w+)`[^|]*\|(.*)\|$", page, re.MULTILINE))
    assert set(rows) == {run.arm.name for run in runs} | {"exact_output"}
    for name, cells in rows.items():
        if name == "exact_output":
            others = records.read_all(directory / "causes")
            found = [_error_cell(run) for run in others if run.arm.name == name]
            assert cells.split("|")[-1].strip() == ", ".join(found)
            continue
        found = [(*_cells(run), _error_cell(run)) for run in runs if run.arm.name == name]
        assert [cell.strip() for cell in cells.split("|")] == [
            ", ".join(of_seeds) for of_seeds in zip(*found, strict=True)
        ], name


def test_an_error_of_delta_of_random_sign_leaves_the_scores_of_exact():
    """Also checks what docs/failure.md says of it."""
    runs = records.read_all(RESULTS / "true_bfloat16" / "delta")
    random = [run for run in runs if run.arm.name == "delta_stochastic"]
    assert [run.seed for run in random] == [1, 2, 3]
    assert min(causes_figure.largest_error(run) for run in random) > 1
    scores = [causes_figure.last_score(run) for run in random]
    (control,) = (causes_figure.last_score(run) for run in runs if run.arm.name == "flash")
    assert max(scores) < 512 < control / 10
    page = (ROOT / "docs" / "failure.md").read_text()
    assert ", ".join(f"{score:,.0f}" for score in scores) in page


def test_an_error_of_o_runs_away_if_the_forward_pass_has_it_too():
    """Also checks what docs/failure.md says of it, and the sizes in the page of δ."""
    directory = RESULTS / "true_bfloat16"
    shared, apart = (
        [run for run in records.read_all(directory / "delta") if run.arm.name == arm]
        for arm in ("output_stochastic", "output_apart")
    )
    assert [run.seed for run in (*shared, *apart)] == [1, 2, 3] * 2
    (first,) = (run for run in records.read_all(directory / "delta") if run.arm.name == "exact")
    others = [run for run in records.read_all(directory / "arithmetic") if run.arm.name == "exact"]
    exact = {run.seed: causes_figure.last_score(run) for run in others} | {
        1: causes_figure.last_score(first)
    }
    for one, other in zip(shared, apart, strict=True):
        assert causes_figure.last_score(one) > 18 * exact[one.seed]
        assert causes_figure.last_score(other) < 1.8 * exact[one.seed]
        assert 0.8 < _error_of_delta(one, 500) / _error_of_delta(other, 500) < 1.25
        assert _error_of_delta(one) < _error_of_delta(other)
    page = (ROOT / "docs" / "failure.md").read_text().replace("\n", " ")
    ends = f"ends at {_listed(shared)}; for δ alone, errors as large, at {_listed(apart)},"
    assert ends in page


def _listed(runs: list[records.ArmRecord]) -> str:
    return ", ".join(f"{causes_figure.last_score(run):,.0f}" for run in runs)


def test_the_page_of_coarse_has_what_the_records_have():
    page = (RESULTS / "coarse" / "README.md").read_text()
    runs = records.read_all(RESULTS / "coarse")
    table = page[page.index("|---") : page.index("**What it says")]
    rows = [row.strip("| ").split(" | ") for row in table.splitlines()[1:] if row]
    arms = ("output", "output_value", "output_value_dynamic_max", "exact")
    for arm, row in zip(
        (*arms, *(f"output_{bits}" for bits in (3, 4, 5, 6)), "output_apart"), rows, strict=True
    ):
        of = sorted((run for run in runs if run.arm.name == arm), key=lambda run: run.seed)
        assert row[1] == ", ".join(_first_with_two_heads(run) for run in of), arm
        assert row[2] == ", ".join(f"{_largest(run, 1000):,.0f}" for run in of), arm
        ended = all(max(run.signals) == 1400 for run in of)
        if ended or arm == "output_value":
            assert row[3] == ", ".join(f"{_largest(run):,.0f}" for run in of), arm


def _largest(run: records.ArmRecord, step: int | None = None) -> float:
    """The largest score of all layers at a step, or at the last record."""
    layers = run.signals[max(run.signals) if step is None else step]
    return max(max(of["score_maximum"]) for of in layers)


def _first_with_two_heads(run: records.ArmRecord) -> str:
    """The first recorded step at which two heads are above 512."""
    for step, layers in sorted(run.signals.items()):
        if sum(score > 512 for of in layers for score in of["score_maximum"]) >= 2:
            return f"{step:,}"
    return "–"


def test_errors_of_delta_have_no_mean_of_one_sign():
    page = (RESULTS / "true_bfloat16" / "delta" / "README.md").read_text()
    means, spreads = {}, {}
    for run in records.read_all(RESULTS / "true_bfloat16" / "delta"):
        z = [
            np.sign(of["delta_error_mean"]) * np.array(of["delta_error_coherence"])
            for step, layers in run.signals.items()
            if step > 0
            for of in layers
        ]
        assert np.shape(z) == (10 * 12, 12)
        means.setdefault(run.arm.name, []).append(np.mean(z))
        spreads.setdefault(run.arm.name, []).append(np.std(z))
    (mean,), (spread,) = means["flash"], spreads["flash"]
    error = spread / np.sqrt(10 * 12 * 12)
    assert f"`flash` has {mean:.3f} ± {error:.3f} and {spread:.2f}," in page.replace(
        "−", "-"
    ).replace("\n ", "")
    for arm in ("output_stochastic", "output_apart", "delta_stochastic"):
        of, by = means[arm], spreads[arm]
        said = f"`{arm}` {min(of):.3f} to {max(of):.3f} and {min(by):.2f} to {max(by):.2f}"
        assert said in page.replace("−", "-"), arm


def test_the_page_of_the_recipes_has_what_the_records_have():
    directory = RESULTS / "true_bfloat16"
    page = (directory / "recipes" / "README.md").read_text()
    runs = _by_arm(directory / "recipes")
    controls = _by_arm(directory / "delta")
    runs |= {name: [run for run in controls[name] if run.seed == 1] for name in ("flash", "exact")}
    longer = _by_arm(directory / "long_h200")
    of_exact = {run.seed: run.losses for run in (*longer["exact"], *runs["exact"])}
    screen, longer_runs = page.split("**To step 6,000**")
    rows = dict(re.findall(r"^\| `(\w+)`[^|]*\|(.*)\|$", screen, re.MULTILINE))
    assert set(rows) == set(runs)
    for name, cells in rows.items():
        found = []
        for run in runs[name]:
            if name in ("flash_context_2048", "flash_tokens_131k"):
                behind = "other batches"
            else:
                control = runs["exact_medium"][0].losses if "medium" in name else of_exact[run.seed]
                last = min(2000, max(run.losses), max(control))
                above = _loss_above(run, control, 1500, last // 10 * 10)
                behind = f"{above:+.3f}".replace("-", "−")
            found.append((*_cells(run), behind))
        expected = [", ".join(of_seeds) for of_seeds in zip(*found, strict=True)]
        assert [cell.strip() for cell in cells.split("|")] == expected, name
    over = re.findall(r"^\| `(\w+)`[^|]*\|(.*)\|$", longer_runs, re.MULTILINE)
    arms = ["flash", "flash_b2_999", "flash_eps_1e5", "flash_qk_norm", "flash_cosine", "exact"]
    assert [name for name, _ in over[:6]] == arms
    for name, cells in over[:6]:
        of_arm = longer.get(name) or runs[name]
        steps = (2000, 2500, 2750, 3000, 3500, 4000, 5000, 6000)
        for step, cell in zip(steps, cells.split("|"), strict=True):
            found = [
                f"{run.largest('score_maximum', step, 1):,.0f}" if step in run.signals else "–"
                for run in of_arm
            ]
            assert cell.strip() == ("–" if {*found} == {"–"} else ", ".join(found)), (name, step)
    assert [name for name, _ in over[6:]] == ["flash_eps_1e5"] * 3 + ["flash_qk_norm"] * 2
    for place, (name, cells) in enumerate(over[6:]):
        run = runs[name][place % 3]
        of_control = longer["exact"][place % 3].val_losses
        assert (
            cells.replace("−", "-").split()
            == " | ".join(
                f"{run.val_losses[step] - of_control[step]:+.3f}"
                for step in range(1000, 6001, 1000)
            ).split()
        )
    b2 = runs["flash_b2_999"][0]
    at = [run.largest("score_maximum", 2500, 1) for run in runs["flash_b2_999"]]
    end = b2.largest("score_maximum", 6000, 1)
    said = f"scores are {min(at):.0f} to {max(at):.0f} at 2,500, {end:,.0f} at 6,000"
    assert said in (ROOT / "docs" / "failure.md").read_text()
    ahead = [
        _loss_above(b2, longer["exact"][0].losses, *span) for span in ((1500, 2000), (5000, 5500))
    ]
    first, last = (f"{-x:.3f}" for x in ahead)
    assert f"shrinks from {first} in steps 1,501 to 2,000\nto {last} in steps 5,001 to" in page
    later = runs["flash_b2_999"][1:]
    scores = _joined(f"{run.largest('score_maximum', 3250, 1):.0f}" for run in later)
    errors = _joined(_two_digits(causes_figure.largest_error(run, [3250])) for run in later)
    assert f"to step 3,250 and have {scores} there; their errors are {errors} of" in page
    of_eps = runs["flash_eps_1e5"]
    assert f"the largest score of layer 1 is at most {_most(of_eps, [1]):.0f}, that of any" in page
    assert f"that of any layer at most {_most(of_eps, range(12)):.0f}." in page
    early, late = (
        _two_digits(max(causes_figure.largest_error(run, range(1000, end, 250)) for run in of_eps))
        for end in (2501, 6001)
    )
    assert f"it is at most {early} by step 2,500, and {late} of the gradient by step 6,000" in page
    of_norm = [run for run in runs["flash_qk_norm"] if 6000 in run.signals]
    error = _two_digits(max(map(causes_figure.largest_error, of_norm)))
    assert f"is at most {error} at any record, and no layer has a score above" in page
    assert f"a score above {_most(of_norm, range(12)):.0f}." in page
    (medium,) = runs["flash_medium"]
    scores = [medium.largest("score_maximum", step, 1) for step in (2000, 2500, 3000)]
    assert f"is {_joined(f'{score:.0f}' for score in scores)} at steps 2,000" in page.replace(
        "\n  ", " "
    )
    assert f"{_two_digits(causes_figure.largest_error(medium, [3000]))} times at step" in page
    (larger,) = runs["flash_tokens_131k"]
    control = next(run for run in runs["flash"] if run.seed == 1)
    before, last, sooner = (
        _two_digits(causes_figure.largest_error(run, steps))
        for run, steps in (
            (larger, [step for step in larger.signals if step <= 1750]),
            (larger, [2000]),
            (control, [1250]),
        )
    )
    assert f"at most {before} to step 1,750, then {last}. The control has {sooner} at" in page
    flash, exact = (
        _joined(f"{run.largest('score_maximum', 2500, 1):,.0f}" for run in longer[name])
        for name in ("flash", "exact")
    )
    assert f"`flash` has {flash} in layer 1" in page
    assert f"and `exact` {exact} " in page


def _by_arm(directory: Path) -> dict[str, list[records.ArmRecord]]:
    """The runs of an experiment, in the order of their seeds."""
    runs = sorted(records.read_all(directory), key=lambda run: (run.arm.name, run.seed))
    return {name: list(of) for name, of in itertools.groupby(runs, lambda run: run.arm.name)}


def _most(runs: list[records.ArmRecord], layers: Iterable[int]) -> float:
    """The largest score of these layers at any record of the runs."""
    layers = [*layers]
    return max(
        score
        for run in runs
        for at in run.signals.values()
        for layer in layers
        for score in at[layer]["score_maximum"]
    )


def test_the_page_of_other_functions_has_what_the_records_have():
    directory = RESULTS / "true_bfloat16"
    page = (directory / "functions" / "README.md").read_text()
    controls = _by_arm(directory / "long_h200")
    runs = _by_arm(directory / "functions") | {n: controls[n] for n in ("flash", "exact")}
    rows = dict(re.findall(r"^\| `(\w+)`[^|]*\|(.*)\|$", page, re.MULTILINE))
    assert set(rows) == {"cudnn", "flash", "exact"}
    layer = causes_figure.LAYER
    for name, cells in rows.items():
        found = [
            (
                f"{run.largest('score_maximum', 2000, layer):,.0f}",
                f"{run.largest('score_maximum', 2500, layer):,.0f}",
                str(sum(score > 512 for of in run.signals[2500] for score in of["score_maximum"])),
                _two_digits(causes_figure.largest_error(run, range(1000, 2001, 250))),
            )
            for run in runs[name]
        ]
        expected = [", ".join(of_seeds) for of_seeds in zip(*found, strict=True)]
        assert [cell.strip() for cell in cells.split("|")] == expected, name
    own = [
        _two_digits(
            max(
                error
                for step in range(1000, 2001, 250)
                for error, true in zip(
                    run.signals[step][layer]["query_weight_gradient_error_measured"],
                    run.signals[step][layer]["query_weight_gradient_exact"],
                    strict=True,
                )
                if true > causes_figure.LEAST_GRADIENT
            )
        )
        for run in runs["cudnn"]
    ]
    assert f"with cuDNN's own dQ it is {_joined(own)} as well" in page
    other = _most(runs["cudnn"], [i for i in range(12) if i != layer])
    assert f"No other layer has a score above {other:.0f}." in page
    scores = ", ".join(f"{r.largest('score_maximum', 2500, layer):,.0f}" for r in runs["cudnn"])
    assert f"{scores} at step 2,500" in (ROOT / "docs" / "failure.md").read_text()


def test_the_page_of_the_whole_text_has_what_the_records_have():
    directory = RESULTS / "true_bfloat16"
    page = (directory / "whole_text" / "README.md").read_text()
    (run,) = records.read_all(directory / "whole_text")
    (repeats, *_) = _by_arm(directory / "long_h200")["exact"]
    assert run.text_tokens == 237_828_591
    rows = re.findall(r"^\| [\d.]+ million tokens[^|]*\|(.*)\|$", page, re.MULTILINE)
    for of, cells in zip((run, repeats), rows, strict=True):
        steps = (2000, 2500, 3000, 4000, 5000, 5500, 6000, 7000, max(of.signals))
        scores = [f"{of.largest('score_maximum', step, 1):.0f}" for step in steps]
        assert cells.split("|") == [f" {score} " for score in scores]
    large = [sum(s > 512 for of in at for s in of["score_maximum"]) for at in run.signals.values()]
    assert max(large) == 1
    assert f"layer 1 peaks at {_most([run], [1]):.0f}, at step 5,250" in page
    error = _two_digits(causes_figure.largest_error(run))
    assert f"gradient is {error} of it, at step 4,500" in page
    assert f"loss is {run.val_losses[max(run.val_losses)]:.3f} at the end" in page


def _joined(numbers: Iterable[str]) -> str:
    """Numbers as a sentence has them."""
    *first, last = numbers
    return f"{', '.join(first)} and {last}"


def test_the_page_of_the_isolation_table_has_what_the_records_have():
    directory = RESULTS / "true_bfloat16" / "isolation"
    page = (directory / "README.md").read_text()
    runs = {(run.arm.name, run.seed): run for run in records.read_all(directory)}
    rows = re.findall(r"^\| `(\w+)`[^|]*\| (?:fails|stable|–) \|(.*)\|$", page, re.MULTILINE)
    assert {name for name, _ in rows} == {name for name, _ in runs}
    for name, cells in rows:
        seeds = [seed for arm, seed in runs if arm == name]
        of_seeds = [_row(runs[name, seed]) if seed in seeds else _CUT for seed in (1, 2, 3)]
        found = of_seeds[0] if seeds == [1] else map(", ".join, zip(*of_seeds, strict=True))
        assert tuple(cell.strip() for cell in cells.split("|")) == tuple(found), name
    of_parts = re.findall(r"^\| `(\w+)` \|([^|]*)\|([^|]*)\|([^|]*)\|$", page, re.MULTILINE)
    assert len(of_parts) == 9
    for name, *cells in of_parts:
        of = runs[name, 1].signals[1500][causes_figure.LAYER]
        true = np.array(of["query_weight_gradient_exact"])
        total = np.array(of["query_weight_gradient_error_from_total"])
        head = np.argmax(np.where(true > causes_figure.LEAST_GRADIENT, total, 0))
        for part, cell in zip(("dp", "delta", "total"), cells, strict=True):
            value = of[f"query_weight_gradient_error_from_{part}"][head]
            assert cell.strip() == f"{float(f'{value:.2g}'):g}", (name, part)


def test_of_the_public_code_no_rounding_but_that_of_l_runs_away_by_itself():
    """By the rule of two heads. Also checks the score ranges in docs/failure.md."""
    heads, scores = {}, {}
    for run in records.read_all(RESULTS / "true_bfloat16" / "isolation"):
        if 2500 in run.signals:
            layers = [of["score_maximum"] for of in run.signals[2500]]
            above = sum(score > 512 for layer in layers for score in layer)
            heads.setdefault(run.arm.name, []).append(above)
            scores.setdefault(run.arm.name, []).append(max(layers[causes_figure.LAYER]))
    for arm in ("published", "dp_p", "float32_output", "only_normalizer"):
        assert len(heads[arm]) == 3 and min(heads[arm]) >= 2, arm
    for arm in ("normalized", "dp_p_float32_normalizer"):
        assert len(heads[arm]) == 3 and max(heads[arm]) <= 1, arm
    for arm in ("auxiliary_output", "float32_pv", "published_max", "dynamic_max"):
        assert len(heads[arm]) == 3 and min(heads[arm]) >= 2, arm
    for arm in ("only_dp", "float32_normalizer"):
        assert sorted(heads[arm]) in ([0, 1, 2], [1, 1, 2]), arm
    page = (ROOT / "docs" / "failure.md").read_text()
    paragraph = page[page.index("three such roundings") : page.index("**The forward pass must")]
    groups = (
        ("auxiliary_output", "float32_pv", "float32_output", "dp_p"),
        ("normalized", "dp_p_float32_normalizer"),
        ("only_normalizer",),
        ("only_dp",),
        ("published_max", "dynamic_max"),
    )
    for arms in groups:
        of_arms = [score for arm in arms for score in scores[arm]]
        assert f"{min(of_arms):,.0f} to {max(of_arms):,.0f}" in paragraph, arms


def test_the_loss_of_long_runs_leaves_with_layer_2():
    names = ("long", "long_h200")
    runs = [run for name in names for run in records.read_all(RESULTS / "true_bfloat16" / name)]
    largest = {True: [], False: []}
    for run in runs:
        steps = sorted(run.losses)
        left = np.mean([run.losses[step] for step in steps[-50:]]) > 3.6  # else 3.4 to 3.5
        largest[bool(left)].append(max(run.largest("score_maximum", s, 2) for s in run.signals))
    assert len(runs) == 18
    assert sorted(largest[True]) == [179_600, 793_200, 2_899_000]
    assert max(largest[False]) < 43.05


def test_the_long_runs_begin_as_those_of_the_first_batch():
    first = {
        (run.arm.name, run.seed): run.losses
        for run in records.read_all(RESULTS / "true_bfloat16" / "arithmetic")
    }
    for run in records.read_all(RESULTS / "true_bfloat16" / "long"):
        losses = first[run.arm.name, run.seed]
        common = losses.keys() & run.losses.keys()
        assert len(common) == 250  # every tenth step
        assert all(losses[step] == run.losses[step] for step in common)


def test_the_page_of_nanogpt_has_what_the_records_have():
    directory = RESULTS / "true_bfloat16" / "nanogpt"
    page = (directory / "README.md").read_text()
    cells = {}
    for run in records.read_all(directory):
        scores = run.signals[2250][1]["score_maximum"] if 2250 in run.signals else None
        largest, large = cells.setdefault(run.arm.name, ([], []))
        largest.append("–" if scores is None else f"{max(scores):,.0f}")
        large.append("–" if scores is None else str(sum(score > 512 for score in scores)))
    assert set(cells) == {"flash", "cudnn", "float32"}
    for name, columns in cells.items():
        (line,) = re.findall(rf"^\| `{name}`.*$", page, re.MULTILINE)
        assert [cell.strip().split(", ") for cell in line.split("|")[2:4]] == [*columns], name


def test_a_runaway_tells_the_first_runs_in_true_bfloat16_that_exploded():
    runs = records.read_all(RESULTS / "true_bfloat16" / "first")
    exploded = {(run.arm.name, run.seed) for run in runs if run.explosion is not None}
    judged = {(run.arm.name, run.seed): run.large_heads for run in runs}
    assert {name for name, large in judged.items() if large and large.ran_away} == exploded
    assert len(exploded) == 7
    assert [large.heads for name, large in judged.items() if large and name not in exploded] == [
        0
    ] * 3
    words = {outcome.arm.name: outcome.words for outcome in outcomes.outcomes(runs)}
    assert words["published_normalizer_float32"] == {2024: "censored"}  # ended before step 2,000
    assert words["published_normalized"] == {2024: "growing"}
    assert words["exact"] == words["normalized_delta"] == {2024: "healthy"}


def largest_after_the_start(directory):
    """The largest score of each seed at any step except the first, by arm."""
    largest = {}
    for run in records.read_all(directory):
        after_start = {step: of for step, of in run.signals.items() if step > 0}
        scores = records.largest_scores(after_start).values()
        largest.setdefault(run.arm.name, []).append(max(map(max, scores)))
    return largest


def test_the_page_of_the_doses_has_the_largest_scores_of_the_records():
    largest = largest_after_the_start(RESULTS / "laptop_dose")
    page = (RESULTS / "laptop_dose" / "README.md").read_text()
    rows = re.findall(
        r"^\| [^|]+ \| ([\d.,]+, [\d.,]+, [\d.,]+) \| ([^|]+) \|$", page, re.MULTILINE
    )
    doses = ("", "_mean_1", "_mean_03", "_mean_0", "_rate_3e3", "_rate_1e3")
    sizes = ("_head_size_16", "_head_size_32", "_head_size_128")
    assert len(largest) == 2 * len(rows)
    for dose, cells in zip((*doses, *sizes), rows, strict=True):
        for arm, texts in zip(("flash", "exact"), cells, strict=True):
            for text, value in zip(texts.split(", "), largest[arm + dose], strict=True):
                shown = f"{value:.2f}" if value < 1 else f"{float(f'{value:.3g}'):,.0f}"
                assert text == shown, (arm, dose)


def test_the_page_of_the_causes_has_the_largest_scores_of_the_records():
    largest = largest_after_the_start(RESULTS / "laptop_causes")
    page = (RESULTS / "laptop_causes" / "README.md").read_text()
    number = r"([\d.,]+)"
    row = rf"^\| `(\w+)`.*\| \**{number}, {number}, {number}\** \|$"
    rows = re.findall(row, page, re.MULTILINE)
    assert {name for name, *_ in rows} == set(largest)
    for name, *texts in rows:
        assert len(largest[name]) == 20
        values = min(largest[name]), np.median(largest[name]), max(largest[name])
        for text, value in zip(texts, values, strict=True):
            shown = f"{value:.2f}" if value < 1 else f"{float(f'{value:.3g}'):,.0f}"
            assert text.rstrip(",") == shown, (name, texts)


def test_the_page_of_8_bits_has_the_largest_scores_of_the_records():
    largest = largest_after_the_start(RESULTS / "laptop_fp8")
    page = (RESULTS / "laptop_fp8" / "README.md").read_text()
    rows = re.findall(r"^\| `(\w+)`[^|]* \| \**([\d., ]+?)\** \|$", page, re.MULTILINE)
    assert {name for name, _ in rows} == set(largest)
    for name, texts in rows:
        for text, value in zip(texts.split(", "), largest[name], strict=True):
            digits = 2 if value < 100 else 3
            shown = float(f"{value:.2f}" if value < 1 else f"{value:.{digits}g}")
            assert float(text.replace(",", "")) == shown, (name, texts)


def test_the_page_of_the_rotation_has_what_the_records_have():
    directory = RESULTS / "laptop_rope"
    page, largest = (directory / "README.md").read_text(), largest_after_the_start(directory)
    runs = _by_arm(directory)
    rows = re.findall(
        r"^\| `(\w+)`[^|]* \| (\d+) \| \**([^|*]+)\** \| ([^|]+) \|$", page, re.MULTILINE
    )
    assert {name for name, *_ in rows} == set(runs) == set(largest)
    for name, still, scores, losses in rows:
        turned = 64 * float(name.split("_")[1]) ** (-np.arange(32) / 32)
        assert int(still) == np.sum(turned < 1)
        digits = (2 if value < 100 else 3 for value in largest[name])
        shown = (float(f"{x:.{n}g}") for x, n in zip(largest[name], digits, strict=True))
        assert scores.split(", ") == [f"{x:,.0f}" for x in shown], name
        assert losses.split(", ") == [f"{run.val_losses[400]:.3f}" for run in runs[name]], name
    times = {
        base: sorted(np.divide(largest[f"flash_{base}"], largest[f"exact_{base}"]))
        for base in ("1e30", "1e4", "100", "10")
    }
    least, *_, most = times["1e30"]
    assert f"are {least:.0f} to {float(f'{most:.2g}'):.0f} times those" in page
    least, *_, most = times["1e4"]
    assert f"are {least:.1f} to {most:.0f} times those" in page
    apart = sorted(times["100"] + times["10"])
    assert max(apart[:3]) < 1
    assert f"are {apart[3]:.0f} to {apart[5]:.0f} times as\n  large in three pairs of six" in page
    begun = {
        name: [_error_of_learning_heads(run, 50, 0.0) for run in of] for name, of in runs.items()
    }
    flash = [error for name, errors in begun.items() if "flash" in name for error in errors]
    assert len(flash) == 15
    assert f"is {min(flash):.1f} to {max(flash):.2g} times".replace("3.5e+02", "350") in page
    cured = [error for name, errors in begun.items() if "normalized" in name for error in errors]
    assert (len(cured), f"{max(cured):.2f}") == (6, "0.26")
    held = [error for name, errors in begun.items() if "exact" in name for error in errors]
    *most, third, second, first = sorted(held)
    assert (len(most), f"{third:.2f}", f"{second:.0f}", f"{first:.0f}") == (9, "0.28", "12", "14")
    learned = {
        arithmetic: [
            (run.val_losses[400] < 4, largest[name][place])
            for name, of in runs.items()
            if ("flash" in name) == (arithmetic == "flash")
            for place, run in enumerate(of)
        ]
        for arithmetic in ("flash", "others")
    }
    assert [(sum(x for x, _ in of), len(of)) for of in learned.values()] == [(3, 15), (11, 18)]
    grown = [score for has_learned, score in learned["others"] if has_learned]
    assert f"to {min(grown):.0f} to {float(f'{max(grown):.3g}'):,.0f}: a score" in page


def _peak(run: records.ArmRecord) -> float:
    """The largest score of any layer at any record."""
    return max(map(max, records.largest_scores(run.signals).values()))


def test_the_page_of_a_llama_style_model_has_what_the_records_have():
    directory = RESULTS / "true_bfloat16"
    page, runs = (directory / "llama" / "README.md").read_text(), _by_arm(directory / "llama")
    rows = re.findall(r"^\| `(\w+)`, seed (\d) \|(.*)\|$", page, re.MULTILINE)
    assert len(rows) == sum(map(len, runs.values())) == 6
    for name, seed, cells in rows:
        (run,) = (run for run in runs[name] if run.seed == int(seed))
        scores = records.largest_scores(run.signals)
        steps = (1000, 1500, 1750, 2500, 3000, 3250, 3700)
        shown = [f"{max(scores[s]):.0f}" if s in scores else "–" for s in steps]
        large = max(
            sum(x > 512 for of in layers for x in of["score_maximum"])
            for layers in run.signals.values()
        )
        assert [cell.strip() for cell in cells.split("|")] == [*shown, str(large)], (name, seed)
        assert max(of_layers[1] for of_layers in scores.values()) < 46
    for name, of in runs.items():
        errors = [max(_error_of_learning_heads(r, s) for s in r.signals if s >= 1000) for r in of]
        assert f"| `{name}` | {', '.join(map(_two_digits, errors))} |" in page
    peaks = [[_peak(run) for run in runs[name]] for name in ("flash", "exact")]
    assert f"Scores peak between {min(peaks[1]):.0f} and {max(peaks[0]):.0f} under either" in page
    times = np.divide(*peaks)
    assert f"are {min(times):.1f} to {max(times):.1f} times those" in page
    ends = [runs["flash"][i].val_losses[3700] - runs["exact"][i].val_losses[3700] for i in (0, 2)]
    assert " and ".join(f"{x:+.3f}".replace("-", "−") for x in ends) + " (seeds 1 and 3)" in page
    lasts = (runs["flash"][1].steps, runs["exact"][1].steps)
    assert "`flash` ended after {:,} steps and `exact` after {:,}.".format(*lasts) in page
    still = _by_arm(directory / "llama_parts")
    (flash,), (exact,) = still["flash_rope_1e30"], still["exact_rope_1e30"]
    assert f"`flash` peaks at {_peak(flash):.0f} and `exact` at {_peak(exact):.0f} to" in page
    error = max(_error_of_learning_heads(flash, s) for s in flash.signals if s >= 1000)
    assert f"the error reaches {_two_digits(error)}." in page


def _at(directory: str, arm: str, step: int, layer: int = causes_figure.LAYER) -> str:
    """The largest score of a layer, a seed each, at a step or the record before it."""
    scores = []
    for run in _by_arm(RESULTS / "true_bfloat16" / directory)[arm]:
        last = max(s for s in run.signals if s <= step)
        if last >= step - 250:
            scores.append(f"{run.largest('score_maximum', last, layer):,.0f}")
    return ", ".join(scores)


@pytest.mark.parametrize(
    ("row", "cells"),
    [
        ("[GPT-2]", [("arithmetic", "flash", 2500), ("arithmetic", "exact", 2500)]),
        ("[nanoGPT,", [("nanogpt", "flash", 2250), ("nanogpt", "float32", 2250)]),
        ("[weight decay", [("recipes", "flash_weight_decay", 2500)]),
        ("cosine", [("recipes", "flash_cosine", 4000)]),
        ("[rate 1e-3]", [("rates", "flash_1e3", 6250)]),
        ("rate 6e-4", [("rates", "flash_6e4", 7700)]),
        ("131,072", [("recipes", "flash_tokens_131k", 2000)]),
        ("GPT-2 medium", [("recipes", "flash_medium", 3000)]),
        ("AdamW's β₂", [("recipes", "flash_b2_999", 2500)]),
        ("AdamW's ε", [("recipes", "flash_eps_1e5", 6000)]),
        ("QK-norm", [("recipes", "flash_qk_norm", 6000)]),
        ("QK-clip", [("recipes", "flash_qk_clip", 2500)]),
    ],
)
def test_the_table_by_model_has_the_scores_of_the_records(row, cells):
    page = (ROOT / "docs" / "models.md").read_text()
    (line,) = re.findall(rf"^\| {re.escape(row)}.*$", page, re.MULTILINE)
    shown = [cell.strip() for cell in line.split("|")[2:4]]
    assert shown == [_at(*cell) for cell in cells] + ["–"] * (2 - len(cells))


def test_the_table_by_model_has_the_largest_scores_of_llama_style_models():
    page = (ROOT / "docs" / "models.md").read_text()
    of_rows = {
        "llama": ("[Llama-style 125M]", "flash", "exact"),
        "llama_parts": ("the same, RoPE", "flash_rope_1e30", "exact_rope_1e30"),
    }
    for name, (row, *arms) in of_rows.items():
        runs = _by_arm(RESULTS / "true_bfloat16" / name)
        (line,) = re.findall(rf"^\| {re.escape(row)}.*$", page, re.MULTILINE)
        errors = [
            max(_error_of_learning_heads(run, step) for step in run.signals if step >= 1000)
            for run in runs[arms[0]]
        ]
        assert [cell.strip() for cell in line.split("|")[2:5]] == [
            *(", ".join(f"{_peak(run):.0f}" for run in runs[arm]) for arm in arms),
            ", ".join(map(_two_digits, errors)),
        ]


def test_the_page_of_what_a_llama_style_model_learns_has_what_the_records_have():
    directory = RESULTS / "laptop_llama"
    page, largest = (directory / "README.md").read_text(), largest_after_the_start(directory)
    runs = _by_arm(directory)
    for name, of in runs.items():
        losses = [run.val_losses[600] for run in of]
        ends = [float(f"{of_all(largest[name]):.3g}") for of_all in (min, max)]
        (line,) = re.findall(rf"^\| `{name}`.*$", page, re.MULTILINE)
        assert [cell.strip() for cell in line.split("|")[2:5]] == [
            ", ".join(f"{loss:.3f}" for loss in losses),
            f"{sum(loss < 4 for loss in losses)} of 8",
            "{:,.0f} to {:,.0f}".format(*ends),
        ]
    rounded = [score for name in ("flash", "dynamic_max") for score in largest[name]]
    assert (min(rounded) > 512, len(rounded)) == (True, 16)
    others = [
        run.val_losses[600] < 4
        for name in ("normalized", "exact")
        for run, score in zip(runs[name], largest[name], strict=True)
        if score > 512
    ]
    assert (len(others), sum(others)) == (5, 4)


def _error_of_learning_heads(run: records.ArmRecord, step: int, least_score: float = 32.0) -> float:
    """The largest error of W_Q's gradient of heads with 1e-4 of their layer's largest gradient.

    As in the rule `delta`, heads below the least score do not count.
    """
    errors = []
    for layer in run.signals[step]:
        true = np.array(layer["query_weight_gradient_exact"])
        of_heads = np.array(layer["query_weight_gradient_error_from_total"])
        learning = true >= 1e-4 * np.max(true)
        learning &= np.array(layer["score_maximum"]) >= least_score
        errors += of_heads[learning].tolist()
    return max(errors)


def test_nothing_lies_between_the_two_groups_of_arms_on_a_laptop():
    largest = largest_after_the_start(RESULTS / "laptop_causes").values()
    ran_away = [value for values in largest for value in values if min(values) > 1]
    held = [value for values in largest for value in values if min(values) <= 1]
    assert (len(ran_away), len(held)) == (280, 160)
    assert min(ran_away) > 33 > 0.7 > max(held)


PICTURES = {
    "true_bfloat16": ("true_bfloat16/arithmetic",),
    "failure_cpu": ("failure/failure_cpu",),
    "laptop": ("laptop",),
    "nanogpt": ("true_bfloat16/nanogpt",),
    "failure_delta": ("failure/delta_small",),
    "failure_edge_long": ("failure/edge_long",),
    "failure_output": ("failure/output_small",),
    "failure_delta_value": ("failure/delta_size_cpu",),
    "failure_delta_longer": ("failure/delta_longer_cpu",),
    "failure_delta_size_gpt2": ("failure/delta_size_gpt2",),
    "failure_delta_least_gpt2": ("failure/delta_least_gpt2",),
    "failure_row_sum": ("failure/row_sum_small",),
    "first_sight": ("first_sight",),
    "lse_rounding": ("lse_rounding", "--seeds", "1"),
    "lse_rounding_seeds": ("lse_rounding", *CONTROLS),
}


@pytest.mark.parametrize("path", sorted(RESULTS.rglob("titles.toml")), ids=lambda p: p.parent.name)
def test_the_panels_of_a_figure_are_all_named_in_words(path):
    titles = tomllib.loads(path.read_text())
    assert set(titles) == {run.arm.name for run in records.read_all(path.parent)}
    assert not [title for title in titles.values() if "=" in title.replace("δ = rowsum", "")]


@pytest.mark.slow
@pytest.mark.parametrize("picture", PICTURES)
def test_a_page_shows_the_figure_of_the_records(tmp_path, picture):
    """Except for a few pixels, because versions of fonts and Matplotlib move edges."""
    name, *options = PICTURES[picture]
    shutil.copy(RESULTS / "texts.toml", tmp_path)
    copy = shutil.copytree(RESULTS / name, tmp_path / "records")
    drawn = tmp_path / "drawn.png"
    assert main(["lab", "report", str(copy), "--figure", str(drawn), *options]) == 0
    shown = Image.open(ROOT / "docs" / "images" / f"{picture}.png").convert("L")
    of_records = Image.open(drawn).convert("L")
    assert shown.size == of_records.size
    apart = np.abs(np.asarray(shown, np.int32) - np.asarray(of_records, np.int32)) > 32
    assert np.mean(apart) < 1e-3


@pytest.mark.parametrize(
    ("experiment", "name"),
    [
        ("output_cpu", "output-seed1"),
        ("output_cpu/newest_jax", "output-seed1"),
        ("lse_small", "lse1-seed1"),
        ("output_gpt2", "o2-seed3"),
    ],
)
def test_the_recorded_batches_are_drawn_from_a_text_of_the_length_that_is_told(experiment, name):
    runs = archive.read(FAILURE / experiment)
    header = next(run.header for run in runs if run.name == name)
    config = header["config"]
    length = records.text_lengths(FAILURE)[config["text_sha256"]["train"]]
    draw = SeededOrder(header["seed"], config["batch_size"], length, config["model"]["context"])
    starts = itertools.chain.from_iterable(
        (",".join(map(str, draw(step).tolist())), "\n") for step in range(header["steps"])
    )
    assert hashlib.sha256("".join(starts).encode()).hexdigest() == header["data_order_sha256"]


_GONE_ON = (2000, 2250, 2500, 2750, 3000)


def _runs_that_went_on() -> dict[str, list[records.ArmRecord]]:
    """The runs that changed their arithmetic at step 2,000, and their controls, by arm."""
    longer = records.read_all(RESULTS / "true_bfloat16" / "long_h200")
    runs = [run for run in longer if run.arm.name in ("flash", "exact")]
    runs += records.read_all(RESULTS / "true_bfloat16" / "why")
    return {
        name: [run for run in runs if run.arm.name == name] for name in {r.arm.name for r in runs}
    }


def test_the_page_of_runs_that_went_on_has_what_the_records_have():
    page = (RESULTS / "true_bfloat16" / "why" / "README.md").read_text()
    runs = _runs_that_went_on()
    rows = dict(re.findall(r"^\| `(\w+)`[^|]*\|(.*)\|$", page, re.MULTILINE))
    assert set(rows) == set(runs)
    exact = {run.seed: run.losses for run in runs["exact"]}
    for name, cells in rows.items():
        found = [
            (
                *(f"{run.largest('score_maximum', step, 1):,.0f}" for step in _GONE_ON),
                str(sum(x > 512 for of in run.signals[3000] for x in of["score_maximum"])),
                _two_digits(causes_figure.largest_error(run, _GONE_ON[1:])),
                f"{_loss_above(run, exact[run.seed], 2500, 2990):+.4f}",
            )
            for run in runs[name]
        ]
        said = [cell.strip() for cell in cells.split("|")]
        assert said == [", ".join(of_seeds) for of_seeds in zip(*found, strict=True)], name


def _loss_above(run: records.ArmRecord, control: dict[int, float], after: int, until: int) -> float:
    """The mean of the loss less the control's, over the records of steps `after` + 1 to `until`."""
    steps = range(after + 10, until + 1, 10)
    return float(np.mean([run.losses[step] - control[step] for step in steps]))


def test_without_the_rounding_scores_that_ran_away_no_longer_grow():
    """Also checks what docs/failure.md and docs/exploded.md say of it."""
    runs = _runs_that_went_on()
    ends, grown = {}, {}
    for name, of_seeds in runs.items():
        at = [[run.largest("score_maximum", step, 1) for step in _GONE_ON] for run in of_seeds]
        ends[name] = [scores[-1] for scores in at]
        grown[name] = [scores[-1] / scores[0] for scores in at]
    for name in ("flash", "flash_then_exact", "flash_then_normalized"):
        assert [run.seed for run in runs[name]] == [1, 2, 3]
    assert 5.3 < min(grown["flash"]) < max(grown["flash"]) < 9
    without = [*grown["flash_then_exact"], *grown["flash_then_normalized"]]
    assert f"{min(without):.2f} to {max(without):.2f}" == "0.56 to 0.78"
    of_exact = {run.seed: run.largest("score_maximum", 3000, 1) for run in runs["exact"]}
    went_on = runs["exact_then_flash"]
    assert [run.seed for run in went_on] == [1, 2, 3]
    over = [run.largest("score_maximum", 3000, 1) / of_exact[run.seed] for run in went_on]
    at_once = [_two_digits(causes_figure.largest_error(run, [2000])) for run in went_on]
    page = (RESULTS / "true_bfloat16" / "why" / "README.md").read_text()
    assert f"{min(over):.1f} to {max(over):.0f} times the scores of `exact`" in page
    assert f"errors of {_joined(at_once)} times W_Q's gradient" in page

    def span(name: str) -> str:
        return f"{min(ends[name]):,.0f} to {max(ends[name]):,.0f}"

    for page in ("failure.md", "exploded.md"):
        text = " ".join((ROOT / "docs" / page).read_text().split())
        for name in ("flash", "flash_then_normalized"):
            assert span(name) in text, (page, name)
    findings = (ROOT / "docs" / "failure.md").read_text()
    assert span("flash_then_exact") in findings
    assert span("exact_then_flash") in findings


def test_the_page_of_the_rates_has_what_the_records_have():
    page = (RESULTS / "true_bfloat16" / "rates" / "README.md").read_text()
    directory = RESULTS / "true_bfloat16" / "rates"
    runs = {(run.arm.name, run.seed): run for run in records.read_all(directory)}
    steps = (2000, 4000, 5000, 5250, 5500, 6000, 6250, 7000, 7700)
    rows = re.findall(r"^\| `(\w+)`[^|]*, seed (\d)[^|]*\|(.*)\|$", page, re.MULTILINE)
    names = [(name, int(seed)) for name, seed, _ in rows]
    assert sorted(names) == sorted([*runs] * 2)
    for index, (of, (*_, cells)) in enumerate(zip(names, rows, strict=True)):
        run, recorded = runs[of], [step for step in steps if step in runs[of].signals]
        values = (
            [f"{run.largest('score_maximum', step, 1):,.0f}" for step in recorded]
            if index < len(runs)
            else [_two_digits(causes_figure.largest_error(run, [step])) for step in recorded]
        )
        assert [cell.strip() for cell in cells.split("|")] == values + ["–"] * (9 - len(values))
    losses = [runs[name, 1].losses for name in ("flash_1e3", "exact_1e3")]
    steps = [step for step in losses[1] if step > 2000 and step % 10 == 0]
    behind = [losses[0][step] - losses[1][step] for step in steps]
    means = [np.mean(behind[i : i + 50]) for i in range(len(behind) - 49)]
    assert max(np.abs(means)) < 0.004
