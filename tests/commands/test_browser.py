"""The HTML pages of a training run and of `diagnose`, in Chromium.

The screenshots stay in pytest's temporary directory (CONTRIBUTING.md).
"""

import contextlib
import io
import itertools
import json
import math
import re
import runpy

import numpy as np
import pytest
from command import ROOT, run_here
from records.runs import layers, record_run

from lowprec_attn.commands.main import main
from lowprec_attn.diagnostics.rules import RULES
from lowprec_attn.runs.history import History
from lowprec_attn.runs.instability.health import judge
from lowprec_attn.runs.pages import figures, style
from lowprec_attn.runs.run_dir import RunDir

pytestmark = [pytest.mark.browser, pytest.mark.usefixtures("compiled_once")]

WIDE, NARROW = 1200, 400
PAGES = ("trained", "broken", "diagnose_run", "diagnose_file")
FIGURES = {"trained": 8, "broken": 6}
SCREEN = 900


@pytest.fixture(scope="module")
def shots(tmp_path_factory):
    return tmp_path_factory.mktemp("browser")


@pytest.fixture(scope="module")
def pages(browser, text, compiled_once, tmp_path_factory):
    """The path of each page, by name, and the sentences that the page must show."""
    path = tmp_path_factory.mktemp("pages")
    trained, broken = path / "trained", path / "broken"
    run_here(trained, attention__implementation="tiled", data__path=text)
    signals = {step: layers({}, {}) for step in (0, 50, 100)}
    signals[150] = layers({}, {"score_maximum": [600.0, 5.0]})
    signals[200] = layers({}, {"score_maximum": [math.nan, 5.0]})
    losses = [*(5 - 0.01 * step for step in range(150)), *[9.0] * 120, math.nan]
    failure = {"step": 270, "message": "first non-finite value: loss"}
    record_run(broken, losses, signals, failure=failure, steps=400)
    example = runpy.run_path(str(ROOT / "docs" / "examples" / "paper_like.py"))
    np.savez(path / "layer.npz", **example["paper_like_arrays"]())

    said = {name: [judge(History.read(RunDir(path / name))).sentence] for name in PAGES[:2]}
    places = {name: path / f"{name}.html" for name in PAGES}
    _command("report", trained, "--html", places["trained"])
    _command("report", broken, "--html", places["broken"])
    for name, source in (("diagnose_run", trained), ("diagnose_file", path / "layer.npz")):
        printed = _command("diagnose", source, "--html", places[name])
        said[name] = re.findall("^Verdict(?: for .*?)?: (.*)$", printed, re.MULTILINE)
        assert said[name]
    return {name: (places[name], said[name]) for name in PAGES}


def _command(*words):
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main([str(word) for word in words]) == 0
    return printed.getvalue()


def unfold(browser):
    browser.evaluate("[...document.querySelectorAll('details')].map(d => d.open = true)")


def rectangles(browser, selector):
    """[left, top, right, bottom] of elements on the page, in pixels."""
    script = """[...document.querySelectorAll(SELECTOR)].map(e => e.getBoundingClientRect())
      .map(r => [r.left + scrollX, r.top + scrollY, r.right + scrollX, r.bottom + scrollY])"""
    return browser.evaluate(script.replace("SELECTOR", json.dumps(selector)))


@pytest.mark.parametrize("width", [WIDE, NARROW])
@pytest.mark.parametrize("name", PAGES)
def test_a_page_loads_nothing_logs_nothing_and_fits(browser, pages, shots, name, width):
    path, sentences = pages[name]
    browser.open(path, width)
    shown = browser.evaluate("[...document.querySelectorAll('.state')].map(e => e.innerText)")
    assert len(shown) == len(sentences)
    assert all(words in text for words, text in zip(sentences, shown, strict=True))
    _, top, _, bottom = rectangles(browser, ".state")[0]
    assert 0 < top < bottom < SCREEN  # visible without scrolling
    unfold(browser)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    pixels = browser.screenshot(shots / f"{name}-{width}.png")
    assert pixels.shape[1] == width
    assert browser.messages == []
    assert browser.requests == [path.as_uri()]


@pytest.mark.parametrize("width", [WIDE, NARROW])
@pytest.mark.parametrize("name", FIGURES)
def test_figures_are_drawn_and_their_words_do_not_collide(browser, pages, shots, name, width):
    browser.open(pages[name][0], width)
    unfold(browser)
    pixels = browser.screenshot(shots / f"{name}-{width}.png").astype(int)
    frames = rectangles(browser, "figure svg")
    assert len(frames) == FIGURES[name]
    for i, (left, top, right, bottom) in enumerate(np.round(frames).astype(int)):
        assert right - left > 350
        assert bottom - top > 150
        colors = pixels[top:bottom, left:right]
        colored = np.ptp(colors, axis=-1) > 60  # curves have colour; axes and words are grey
        assert np.any(colored, axis=0).sum() > 50, f"figure {i} is empty"
    script = """[...document.querySelectorAll("figure svg")].map(svg => {
      const frame = svg.getBoundingClientRect();
      return [...svg.querySelectorAll("text")].map(e => [e, e.getBoundingClientRect()]).map(
        ([e, r]) => [e.textContent, r.left - frame.left, r.top - frame.top, r.right - frame.left,
                     r.bottom - frame.top, frame.width, frame.height])})"""
    for words in browser.evaluate(script):
        assert len(words) > 5
        for word, left, top, right, bottom, over, down in words:
            assert min(left, top, over - right, down - bottom) > -1, f"{word} is cut off"
        for (one, *a), (other, *b) in itertools.combinations(words, 2):
            across = min(a[2], b[2]) - max(a[0], b[0])
            assert min(across, min(a[3], b[3]) - max(a[1], b[1])) < 1, f"{one} is over {other}"


def test_every_layer_has_its_curve(browser, pages):
    browser.open(pages["trained"][0], WIDE)
    shades = figures.shades(2)
    assert all(_drawn(browser, i, shade) for i in range(1, 1 + len(RULES)) for shade in shades)
    assert _drawn(browser, 0, style.SMOOTHED)


def _drawn(browser, figure, color):
    """Whether a figure has a line of this colour that is longer than a mark."""
    return browser.evaluate(
        f"""(svg => [...svg.querySelectorAll("path[style*='stroke: {color}']")].some(path =>
          path.getBoundingClientRect().width > 10)
        )(document.querySelectorAll("figure svg")[{figure}])"""
    )


def test_a_click_unfolds_the_signals_of_a_layer(browser, pages):
    browser.open(pages["trained"][0], WIDE)
    browser.evaluate(
        "[...document.querySelectorAll('summary')]"
        ".find(e => e.innerText.startsWith('layer 1')).id = 'layer'"
    )
    assert browser.evaluate("document.body.innerText.includes('score_maximum')") is False
    browser.click("#layer")
    browser.wait_until("document.body.innerText.includes('score_maximum')")
    header = browser.evaluate("document.querySelector('#layer ~ div thead').innerText.trim()")
    assert header.split("\t") == ["signal", "all heads, over the steps", "head 0", "head 1"]
    rows = rectangles(browser, "#layer ~ div tbody tr")
    curves = rectangles(browser, "#layer ~ div .spark")
    assert len(curves) == len(rows) > 20
    assert all(right - left > 100 and bottom - top > 20 for left, top, right, bottom in curves)
    assert browser.evaluate("document.querySelectorAll('details[open]').length") == 1


@pytest.mark.parametrize("name", PAGES)
def test_words_stand_out_in_light_and_dark(browser, pages, shots, name):
    backgrounds = []
    for dark in (False, True):
        browser.open(pages[name][0], WIDE, dark)
        unfold(browser)
        if dark:
            browser.screenshot(shots / f"{name}-dark.png")
        page, soft = _styles(browser, "backgroundColor", "body", ".state")
        inks = _styles(browser, "color", "h1", ".state p, p.state", "td", "figcaption")
        inks += _styles(browser, "fill", "figure svg text")
        backgrounds.append(_luminance(page))
        assert abs(_luminance(page) - _luminance(soft)) < 0.15
        assert all(_contrast(ink, soft) > 4.5 for ink in inks)
    assert backgrounds[0] > 0.9 > 0.1 > backgrounds[1]


def _styles(browser, name, *selectors):
    """A computed style of the first element of each selector that the page contains."""
    script = """SELECTORS.map(selector => document.querySelector(selector)).filter(e => e)
      .map(e => getComputedStyle(e).NAME)"""
    return browser.evaluate(
        script.replace("SELECTORS", json.dumps(selectors)).replace("NAME", name)
    )


def _contrast(one, other):
    """The contrast ratio of WCAG 2, which requires 4.5 or more of text."""
    dark, light = sorted([_luminance(one), _luminance(other)])
    return (light + 0.05) / (dark + 0.05)


def _luminance(color):
    channels = np.array(re.findall(r"\d+", color)[:3], float) / 255
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])
