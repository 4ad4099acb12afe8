"""The site in Chromium, at the widths of a phone and of a desktop, light and dark.

The photographs stay in pytest's temporary directory (CONTRIBUTING.md).
"""

import subprocess
import sys

import numpy as np
import pytest
from command import ROOT

pytestmark = pytest.mark.browser

PHONE, DESKTOP = 390, 1280
PAGES = sorted(
    str(page.relative_to(ROOT / "docs").with_suffix("")) for page in (ROOT / "docs").rglob("*.md")
)
# At 10 points and 110 dots per inch a letter is 15 pixels high. A phone shows at least 9 of them.
LEAST_SHRINKING = 0.6
# A figure has few white pixels on a dark page: of its letters at most.
DARK = 128

# A table wider than the page scrolls in a box of its own, which ends where the page does.
TABLES_THAT_STICK_OUT = """[...document.querySelectorAll('article table')].filter(table => {
  const box = table.closest('.table-wrapper');
  return box === null || getComputedStyle(box).overflowX !== 'auto' ||
    box.getBoundingClientRect().right > innerWidth;
}).map(table => table.innerText.slice(0, 60))"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("furo", reason="there is no Sphinx: pip install -e '.[train,docs]'")
    built = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "-n", "docs", str(built)]
    subprocess.run(command, cwd=ROOT, check=True)
    return built


@pytest.fixture(scope="module")
def shots(tmp_path_factory):
    return tmp_path_factory.mktemp("site_in_browser")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [PHONE, DESKTOP])
@pytest.mark.parametrize("name", PAGES)
def test_a_page_fits_and_its_figures_can_be_read(browser, site, shots, name, width, theme):
    browser.open(site / f"{name}.html", width)
    browser.evaluate(f"document.body.dataset.theme = '{theme}'")
    pixels = browser.screenshot(shots / f"{name.replace('/', '-')}-{width}-{theme}.png")
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate(TABLES_THAT_STICK_OUT) == []
    assert browser.messages == []
    assert [url for url in browser.requests if not url.startswith("file:")] == []
    figures = browser.evaluate(
        """[...document.querySelectorAll('article img')].map(image =>
          [image.src, getComputedStyle(image).content, image.clientWidth, image.naturalWidth,
           scrollX + image.getBoundingClientRect().x, scrollY + image.getBoundingClientRect().y,
           image.clientHeight])"""
    )
    for source, shown, over, of, x, y, high in figures:
        figure = pixels[round(y) : round(y + high), round(x) : round(x + over)]
        assert (np.median(figure) < DARK) == (theme == "dark"), source
        if source.endswith("front_light.png"):  # the only figure with twins (site.css)
            twin = ("narrow_" if width == PHONE else "") + theme
            assert shown.endswith(f'front_{twin}.png")') or (shown, twin) == ("normal", "light")
        else:
            assert over >= LEAST_SHRINKING * of > 0, source


def test_the_front_figure_has_a_twin_for_each_width_and_theme(browser, site):
    """A reader who has not chosen a theme sees the one of the system."""
    found = []
    for dark in (False, True):
        browser.open(site / "index.html", PHONE)
        rules = """[...document.styleSheets].flatMap(sheet => [...sheet.cssRules]).filter(rule =>
          rule.conditionText?.includes('prefers-color-scheme: dark') &&
          rule.cssText.includes('front_'))"""
        width = "(max-width: 46em)" if dark else "not all"
        browser.evaluate(
            f"{rules}.map(rule => rule.media.mediaText = rule.cssText.includes('narrow') ? "
            f"'{width}' : 'not all').length"
        )
        image = "document.querySelector('article img')"
        found.append(browser.evaluate(f"getComputedStyle({image}).content"))
    assert ["narrow_light" in found[0], "narrow_dark" in found[1]] == [True, True]
