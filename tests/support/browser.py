"""The documentation in a real browser: build it, open pages, and read what they show."""

from __future__ import annotations

import json
import os
import shutil
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Any

import pytest

from tailavg import AnyTail, AnytimeWindow, ExactWindow, Exponential, Fixed, Freshest, Growing
from tests.support.paths import ROOT
from tests.support.processes import python

MARKS = [
    pytest.mark.slow,
]
"""Of tests that need a browser: `pytestmark = browser.MARKS`."""

INSTALL = "apt-get install chromium chromium-driver"
PHONE, TABLET, DESK = (360, 740), (800, 1100), (1280, 900)
OPTIONS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync"
)


def chromium() -> str | None:
    """Where a browser is, if one is there."""
    found = (shutil.which(name) for name in ("chromium", "google-chrome", "chromium-browser"))
    return next(filter(None, found), None)


def build(folder: Path) -> None:
    """Build the site into this folder, as `make docs` does."""
    options = "--strict", "--quiet", "--site-dir", folder
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    python("-m", "mkdocs", "build", *options, cwd=ROOT, env=environment)


def start(profile: Path) -> Any:
    """A browser that writes down what it is asked for, and what is amiss."""
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    options = ChromeOptions()
    options.binary_location = chromium()
    for option in [*OPTIONS.split(), f"--user-data-dir={profile}"]:
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    # with its path: Selenium looks for no driver of its own
    browser = Chrome(options=options, service=Service(shutil.which("chromedriver")))
    browser.set_script_timeout(90)
    browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": BEFORE_EACH_PAGE})
    return browser


BEFORE_EACH_PAGE = """
(() => {
  if (location.protocol === "file:") localStorage.clear();  // the scheme of the last visit
  const pending = new Set(), { setTimeout, clearTimeout } = window;
  const { requestAnimationFrame, cancelAnimationFrame } = window;
  const tracked = (start, kind) => (act, delay, ...rest) => {
    const soon = !(delay >= 1000), after = (...now) => { pending.delete(kind + id); act(...now); };
    const id = start(after, soon ? delay / 10 : delay, ...rest);
    if (soon) pending.add(kind + id);
    return id;
  };
  window.setTimeout = tracked(setTimeout, "timer ");
  window.clearTimeout = (id) => { pending.delete("timer " + id); clearTimeout(id); };
  window.requestAnimationFrame = tracked(requestAnimationFrame, "frame ");
  window.cancelAnimationFrame = (id) => {
    pending.delete("frame " + id);
    cancelAnimationFrame(id);
  };
  window.atRest = () => document.readyState === "complete" && pending.size === 0;
  window.until = async (condition) => {
    const end = performance.now() + 60_000;
    while (!condition() && performance.now() < end) await new Promise((go) => setTimeout(go, 10));
    return condition();
  };
})();
"""
"""Runs before the scripts of a page, and notes the timers and frames that they wait for.

Timers of less than a second end ten times sooner: what waits for a pause in typing or dragging does
the same, and tests need not wait as long.
`atRest` says that they wait for none, and `until` waits for a condition.
"""


class Pages:
    """A browser, and the site that it shows."""

    def __init__(self, browser: Any, site: Path) -> None:
        self.browser, self.site = browser, site
        self.run = browser.execute_script

    def open(self, name: str, size: tuple[int, int] = DESK, dark: bool = False) -> None:
        """Open a page anew, on a screen of this size, in this scheme."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.resize(size)
        self.browser.get("about:blank")
        self.console(), self.requests()
        self.browser.get(f"{self.site.as_uri()}/{name}")

    def resize(self, size: tuple[int, int]) -> None:
        """Give the screen this size."""
        screen = {"width": size[0], "height": size[1], "deviceScaleFactor": 1}
        command = "Emulation.setDeviceMetricsOverride"
        self.browser.execute_cdp_cmd(command, {**screen, "mobile": size == PHONE})

    def explore(self, link: str = "", **how: Any) -> None:
        """Open the explorer with these settings, and wait until it shows them."""
        self.open(f"explorer.html{link}", **how)
        self.rest()

    def follow(self, link: str) -> None:
        """Follow a link within the explorer, and wait until it shows these settings."""
        self.run("location.hash = arguments[0]", link)
        self.rest()

    def rest(self) -> None:
        """Wait until the explorer has done what it does later, and shows what its controls say."""
        now = "document.getElementById('x-live').textContent.split(', ')[0].replaceAll(',', '')"
        step = "Number(document.getElementById('x-t').value.replaceAll(',', ''))"
        self.wait("atRest()", "document.title")
        self.wait(f"{now} === 'Step ' + {step}", now)

    def wait(self, condition: str, instead: str = "document.title") -> None:
        """Wait until an expression is true; `instead` says what there is otherwise."""
        happened = self.run(f"return until(() => {condition})")
        assert happened, f"expected {condition}, got {self.run(f'return {instead}')}"

    def text(self, selector: str) -> str:
        """What an element of the page says."""
        return self.run("return document.querySelector(arguments[0]).textContent", selector)

    def stat(self, name: str) -> str:
        """One of the numbers of the explorer."""
        return self.text(f"[data-stat={name}]")

    def press(self, *keys: str) -> None:
        """Press keys, one after another."""
        from selenium.webdriver import ActionChains

        ActionChains(self.browser).send_keys(*keys).perform()

    def find(self, identifier: str) -> Any:
        """A control of the explorer."""
        return self.browser.find_element("id", f"x-{identifier}")

    def settings(self) -> dict[str, Any]:
        """What the controls of the explorer say."""
        return self.run(
            """const of = (id) => document.getElementById(`x-${id}`).value.replaceAll(',', '');
            const radio = (name) => document.querySelector(`[name=${name}]:checked`).value;
            return { kind: radio('kind'), method: radio('method'), k: of('k'), c: of('c'),
                     atMost: of('atMost'), accumulators: of('accumulators'), t: of('t'),
                     numbers: of('numbers') };"""
        )

    def blocks(self) -> list[int]:
        """Where the blocks that are drawn start."""
        return self.run(
            "return [...document.querySelectorAll('.x-block')].map(one => +one.dataset.start)"
        )

    def console(self) -> list[str]:
        """What was written to the console since the last look."""
        return [f"{one['level']}: {one['message']}" for one in self.browser.get_log("browser")]

    def requests(self) -> list[str]:
        """What was asked for since the last look."""
        events = (json.loads(one["message"]) for one in self.browser.get_log("performance"))
        sent = (one["message"] for one in events)
        return [
            one["params"]["request"]["url"]
            for one in sent
            if one["method"] == "Network.requestWillBeSent"
        ]


def link(rule: Any, t: int, window: Any = None) -> str:
    """The link to a rule in the explorer; `window` is what to read an AnyTail with."""
    is_freshest = isinstance(window, Freshest)
    window = window.window if is_freshest else window or rule.window
    parts = {"window": window.k if isinstance(window, Fixed) else window.c}
    if isinstance(window, Growing) and window.at_most is not None:
        parts["at_most"] = window.at_most
    if isinstance(rule, AnytimeWindow):
        parts["method"] = "paper" if rule.turns == "paper" else "anytime"
    else:
        kinds = {AnyTail: "anytail", Exponential: "exponential", ExactWindow: "exact"}
        parts["method"] = "freshest" if is_freshest else kinds[type(rule)]
    if isinstance(rule, AnytimeWindow | AnyTail):
        parts["accumulators"] = rule.accumulators
    return "#" + "&".join(f"{name}={value}" for name, value in {**parts, "t": t}.items())


def written(x: float) -> str:
    """A number as the explorer writes it.

    Examples:
        >>> written(287.49999999999994), written(0.05897), written(30000.0)
        ('287.5', '0.059', '30,000')
    """
    value = Decimal(f"{x:.12g}")
    digits = 1 if abs(value) >= 100 else 2 if abs(value) >= 1 else 2 - value.adjusted()
    rounded = value.quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP) if value else value
    text = f"{rounded:,f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
