"""The page that `tailavg plot` writes, in a browser: it zooms, tells values and fits a phone."""

import numpy as np
import pytest
from selenium.webdriver import ActionChains, Keys

from tailavg import AnytimeWindow, TailAverage
from tests.support import browser, commands
from tests.support.browser import DESK, PHONE, Pages

pytestmark = browser.MARKS

SAMPLES = np.random.default_rng(0).normal(size=3000).round(6) + 5
DRAWN = "document.querySelector('canvas').width > 0"
INK = """
const canvas = document.querySelector('canvas'), pen = canvas.getContext('2d');
const pixels = pen.getImageData(0, 0, canvas.width, canvas.height).data;
let blue = 0;
for (let i = 0; i < pixels.length; i += 4)
  if (pixels[i + 3] > 200 && pixels[i] < 60 && pixels[i + 2] > 150) blue++;
return blue;
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run, and its pages."""
    folder = tmp_path_factory.mktemp("plot")
    (folder / "loss.txt").write_text("".join(f"{x}\n" for x in SAMPLES.tolist()))
    plot = ["plot", "loss.txt", "--windows", "0.1,500", "-o"]
    commands.run(*plot, "page.html", folder=folder)
    commands.run(*plot, "log.html", "--log-x", "--log-y", folder=folder)
    return folder


@pytest.fixture
def page(browser, folder, request):
    """The page of a run, open, and closed without a complaint."""
    page = Pages(browser, folder)
    page.open(getattr(request, "param", "page.html"))
    page.wait(DRAWN)
    yield page
    assert [told for told in page.console() if "readback" not in told] == []  # which tests do
    assert [url for url in page.requests() if not url.startswith(("file:", "data:"))] == []


def view(page):
    return page.run("return view.map(back)")


def values(page):
    return page.run("return [...document.querySelectorAll('li b')].map(one => one.textContent)")


def test_shows_the_last_values(page):
    said = [text for text in values(page) if text]
    for window, text in zip((0.1, 500), said, strict=True):
        average = TailAverage(AnytimeWindow(window, 12))
        average.update_many(SAMPLES)
        assert text == f"{average.value():.4g} ± {average.standard_error():.2g}"
    assert page.run(INK) > 500, "the first average is drawn"


def test_zooms_by_keys_and_by_dragging(page):
    canvas = page.browser.find_element("tag name", "canvas")
    assert view(page) == [1, 3000]
    canvas.send_keys("+")
    first, last = view(page)
    assert last - first == pytest.approx(0.7 * 2999)
    canvas.send_keys(Keys.ARROW_RIGHT)
    assert view(page) == pytest.approx([first + 0.2 * (last - first), last + 0.2 * (last - first)])
    canvas.send_keys("0")
    assert view(page) == [1, 3000]
    width = canvas.size["width"] - 90 - 30
    middle = 90 + width / 2 - canvas.size["width"] / 2
    drag = ActionChains(page.browser).move_to_element_with_offset(canvas, middle - width / 4, 0)
    drag.click_and_hold().move_by_offset(width // 2, 0).release().perform()
    assert view(page) == pytest.approx([750, 2250], abs=10)
    page.browser.find_element("id", "all").click()
    assert view(page) == [1, 3000]


def test_tells_the_values_under_the_pointer(page):
    canvas = page.browser.find_element("tag name", "canvas")
    ActionChains(page.browser).move_to_element_with_offset(canvas, 40, 0).perform()
    value, row = values(page)[1].split(" at ")
    row = int(row.replace(",", ""))
    scanned = TailAverage(AnytimeWindow(0.1, 12)).scan(SAMPLES)
    assert float(value) == pytest.approx(scanned[row - 1], abs=1e-3)


def test_lines_can_be_hidden(page):
    before = page.run(INK)
    page.browser.find_elements("css selector", "input[type=checkbox]")[1].click()
    assert page.run(INK) < before / 10


@pytest.mark.parametrize("page", ["log.html"], indirect=True)
def test_logarithmic_axes(page):
    assert view(page) == pytest.approx([1, 3000])
    assert page.run(INK) > 300


@pytest.mark.parametrize("size", [PHONE, DESK])
def test_fits_in_both_schemes(page, size):
    papers = []
    for dark in (False, True):
        page.open("page.html", size=size, dark=dark)
        page.wait(DRAWN)
        assert page.run("return document.documentElement.scrollWidth <= innerWidth")
        assert page.run(INK) > 100
        papers.append(page.run("return getComputedStyle(document.body).backgroundColor"))
    assert papers == ["rgb(255, 255, 255)", "rgb(20, 23, 28)"]
