"""Headless Chromium for the tests of pages: Qt WebEngine, from the extra `browser`."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
os.environ.setdefault("QTWEBENGINE_CHROMIUM_FLAGS", "--disable-gpu")
if hasattr(os, "getuid") and os.getuid() == 0:  # Chromium's sandbox refuses root
    os.environ.setdefault("QTWEBENGINE_DISABLE_SANDBOX", "1")

from PySide6.QtCore import QPoint, Qt, QUrl
from PySide6.QtGui import QImage, QPainter
from PySide6.QtTest import QTest
from PySide6.QtWebEngineCore import (
    QWebEnginePage,
    QWebEngineProfile,
    QWebEngineSettings,
    QWebEngineUrlRequestInfo,
    QWebEngineUrlRequestInterceptor,
)
from PySide6.QtWebEngineWidgets import QWebEngineView
from PySide6.QtWidgets import QApplication

_HEIGHT = 900
_TIMEOUT = 30.0
_DARK = (
    "[...document.styleSheets[0].cssRules]"
    ".filter(rule => rule.conditionText == '(prefers-color-scheme: dark)')"
)


class Browser:
    """A window of Chromium.

    Attributes:
      messages: console messages of every level since the last page was opened.
      requests: URLs requested since then, the page's own first. Only files are served.
    """

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.requests: list[str] = []
        self._application = QApplication.instance() or QApplication(["browser"])
        self._profile = QWebEngineProfile()
        self._interceptor = _Interceptor(self.requests)
        self._profile.setUrlRequestInterceptor(self._interceptor)
        self._page = _Page(self._profile, self.messages)
        bars = QWebEngineSettings.WebAttribute.ShowScrollBars
        self._page.settings().setAttribute(bars, False)
        self._view = QWebEngineView()
        self._view.setPage(self._page)
        self._view.show()

    def close(self) -> None:
        """Ends Chromium's processes; a page must go before its profile."""
        self._view.close()
        for owned in (self._view, self._page, self._profile):
            owned.deleteLater()
            QTest.qWait(0)

    def open(self, path: Path, width: int, dark: bool = False) -> None:
        """Loads a page.

        Args:
          path: the file of the page.
          width: the width of the window, in pixels.
          dark: whether to show the colours for readers who prefer dark ones. Without a desktop Qt
            has no such setting, so the page's media query is made to hold.
        """
        self.messages.clear()
        self.requests.clear()
        self._view.resize(width, _HEIGHT)
        loaded: list[bool] = []
        self._page.loadFinished.connect(loaded.append)
        self._page.load(QUrl.fromLocalFile(str(path.absolute())))
        _wait(lambda: bool(loaded), f"{path} to load")
        self._page.loadFinished.disconnect(loaded.append)
        assert loaded == [True], f"{path} was not loaded"
        self.wait_until(f"innerWidth == {width}")
        if dark:
            held = self.evaluate(f"{_DARK}.map(rule => rule.media.mediaText = 'all').length")
            assert held == 1, f"{held} media queries for dark colours"

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression, converted through JSON."""
        found: list[str] = []
        self._page.runJavaScript(f"JSON.stringify({script})", 0, found.append)
        _wait(lambda: bool(found), script)
        return json.loads(found[0])

    def wait_until(self, condition: str) -> None:
        """Waits until a JavaScript expression is true."""
        _wait(lambda: self.evaluate(condition), condition)

    def click(self, selector: str) -> None:
        """Scrolls to an element and presses the mouse near its left edge."""
        found = f"document.querySelector({json.dumps(selector)})"
        self.evaluate(f"{found}.scrollIntoView({{block: 'center'}}) ?? 0")
        self._drawn()
        x, y, height = self.evaluate(
            f"(r => [r.x, r.y, r.height])({found}.getBoundingClientRect())"
        )
        place = QPoint(round(x) + 15, round(y + height / 2))
        QTest.mouseClick(self._view.focusProxy(), Qt.MouseButton.LeftButton, pos=place)

    def screenshot(self, path: Path) -> np.ndarray:
        """Writes the whole page as PNG; returns its pixels [height, width, 3].

        The picture is assembled from several windows, because Chromium limits the height of one.
        """
        height, width = self.evaluate("[document.documentElement.scrollHeight, innerWidth]")
        image = QImage(width, height, QImage.Format.Format_RGB32)
        painter = QPainter(image)
        for top in range(0, height, _HEIGHT):
            self.evaluate(f"scrollTo(0, {top}) ?? 0")
            self._drawn()
            painter.drawPixmap(0, round(self.evaluate("scrollY")), self._view.grab())
        painter.end()
        self.evaluate("scrollTo(0, 0) ?? 0")
        assert image.save(str(path)), path
        pixels = np.frombuffer(image.constBits(), np.uint8).reshape(height, width, 4)
        return pixels[..., 2::-1].copy()

    def _drawn(self) -> None:
        """Waits for two frames, because the first may already have been under way."""
        frame = "requestAnimationFrame"
        self.evaluate(f"(window.drawn = 0, {frame}(() => {frame}(() => window.drawn = 1)), 0)")
        self.wait_until("window.drawn == 1")
        QTest.qWait(100)  # until Chromium's process has updated the window


class _Page(QWebEnginePage):
    def __init__(self, profile: QWebEngineProfile, messages: list[str]) -> None:
        super().__init__(profile)
        self._messages = messages

    def javaScriptConsoleMessage(self, level: Any, message: str, line: int, source: str) -> None:
        self._messages.append(f"{level.name}: {message} ({source}:{line})")


class _Interceptor(QWebEngineUrlRequestInterceptor):
    def __init__(self, requests: list[str]) -> None:
        super().__init__()
        self._requests = requests

    def interceptRequest(self, info: QWebEngineUrlRequestInfo) -> None:
        self._requests.append(info.requestUrl().toString())
        info.block(info.requestUrl().scheme() != "file")


def _wait(done: Callable[[], Any], what: str) -> None:
    end = time.monotonic() + _TIMEOUT
    while not done():
        if time.monotonic() > end:
            raise TimeoutError(f"waited {_TIMEOUT:g} s for {what}")
        QTest.qWait(10)
