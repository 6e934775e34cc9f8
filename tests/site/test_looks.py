"""The explorer on a phone and in the dark: nothing sticks out, all can be read and touched."""

import pytest

from tests.support import browser
from tests.support.browser import DESK, PHONE, TABLET
from tests.support.effort import exhaustive

pytestmark = browser.MARKS

LINKS = [
    "#window=0.25&t=1150",
    "#window=1000000&method=paper&accumulators=16&t=1000000&numbers=70000000000",
    "#window=0.3&method=anytail&t=1000000",
    "#window=0.3&method=freshest&t=1000000",
    "#window=0.3&at_most=1000&method=exponential&t=5000",
    "#window=3&method=exact&t=1",
]

CONTRASTS = """
const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
function rgba(colour) {
  canvas.clearRect(0, 0, 1, 1);
  canvas.fillStyle = colour;
  canvas.fillRect(0, 0, 1, 1);
  const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
  return [r, g, b, a / 255];
}
const over = ([r, g, b, a], under) => [r, g, b].map((x, i) => x * a + under[i] * (1 - a));
function behind(one) {
  if (one === null) return [255, 255, 255];
  const mine = rgba(getComputedStyle(one).backgroundColor);
  return mine[3] === 1 ? mine.slice(0, 3) : over(mine, behind(one.parentElement));
}
const light = (colour) => {
  const linear = (x) => x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4;
  const [r, g, b] = colour.map((x) => linear(x / 255));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const found = [];
for (const one of document.querySelectorAll('.explorer *')) {
  const written = [...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
  if (!(written || (one.type === 'text' && one.value)) || !one.checkVisibility()) continue;
  if (one.matches('title, noscript')) continue;
  const drawn = one.closest('svg');
  let under = behind(drawn ? drawn.parentElement : one);
  if (one.matches('.x-size')) {
    const block = one.previousElementSibling, fades = block.matches('.x-fades');
    const middle = fades ? document.querySelectorAll('.x-stop')[10] : block;
    under = over(rgba(getComputedStyle(middle)[fades ? 'stopColor' : 'fill']), under);
  }
  const ink = over(rgba(getComputedStyle(one)[drawn ? 'fill' : 'color']), under);
  const [low, high] = [light(ink), light(under)].sort((a, b) => a - b);
  found.push([(high + 0.05) / (low + 0.05), (one.textContent || one.value).slice(0, 30)]);
}
return found;
"""

STICKS_OUT = """
return [...document.querySelectorAll('.explorer *')].filter((one) => {
  const { right, left, width } = one.getBoundingClientRect();
  const out = right > innerWidth + 0.5 || left < -0.5;
  return width > 0 && out && !one.closest('.x-figure svg');
}).map((one) => one.id || one.className);
"""


SMALL = """
return [...document.querySelectorAll('.explorer :is(input, button)')]
  .filter((control) => control.checkVisibility())
  .map((control) => [control.id || control.value, control.getBoundingClientRect()])
  .filter(([_, { width, height }]) => width < 40 || height < 40).map(([name]) => name);
"""
BOXES = """
return [...document.querySelectorAll('.explorer input[type=text]')]
  .filter((box) => box.checkVisibility()).map((box) => box.id.replace('x-', ''));
"""
COLOURS = """
return [getComputedStyle(document.body).backgroundColor,
        getComputedStyle(document.querySelector('.x-area')).fill,
        getComputedStyle(document.querySelector('.x-now')).color];
"""


def test_a_phone(pages):
    pages.explore(size=PHONE)
    for link in LINKS:
        pages.follow(link)
        assert pages.run("return document.documentElement.scrollWidth") == PHONE[0], link
        assert pages.run("return innerWidth") == PHONE[0], link
        assert pages.run(STICKS_OUT) == [], link
        assert pages.run(SMALL) == [], link
        settings = pages.settings()
        window = {"fixed": ["k"], "growing": ["c"], "capped": ["c", "atMost"]}[settings["kind"]]
        blocks = ["accumulators"] * (
            settings["method"] in ("anytime", "paper", "anytail", "freshest")
        )
        assert pages.run(BOXES) == [*window, *blocks, "t", "numbers"], link


@exhaustive("a link that is opened on a phone looks as one that is followed there")
@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("size", [PHONE, TABLET, DESK], ids=["phone", "tablet", "desk"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_width_and_scheme(pages, link, size, dark):
    pages.explore(link, size=size, dark=dark)
    assert pages.run("return document.documentElement.scrollWidth - innerWidth") <= 0
    assert pages.run(STICKS_OUT) == []
    assert pages.run(SMALL) == [] or size != PHONE
    assert [text for ratio, text in pages.run(CONTRASTS) if ratio < 4.5] == []


def test_all_text_can_be_read_in_the_light_and_in_the_dark(pages):
    colours = []
    for dark in (False, True):
        pages.explore(dark=dark)
        for link in LINKS:
            pages.follow(link)
            contrasts = pages.run(CONTRASTS)
            assert len(contrasts) > 60, link
            low = [(round(ratio, 2), text) for ratio, text in contrasts if ratio < 4.5]
            assert low == [], f"{link}, dark: {dark}"
        pages.follow(LINKS[0])
        colours.append(pages.run(COLOURS))
    assert [a == b for a, b in zip(*colours, strict=True)] == [False, False, False]
    assert pages.run("return document.body.dataset.mdColorScheme") == "slate"


def test_figures_are_drawn_anew_when_the_width_changes(pages):
    drawn = "document.querySelector('#x-weights svg').viewBox.baseVal.width"
    pages.explore(size=DESK)
    assert pages.run(f"return {drawn}") > PHONE[0]
    pages.resize(PHONE)
    pages.wait(f"{drawn} < {PHONE[0]}", instead=drawn)


def test_quiet_and_alone(pages):
    pages.explore("#window=0.25&t=1150")
    for value in ("paper", "anytail", "freshest", "exponential", "exact", "fixed", "capped"):
        pages.run("document.querySelector(`[value=${arguments[0]}]`).click()", value)
        pages.rest()
    assert pages.console() == []
    asked = pages.requests()
    assert any(url.endswith("/explorer/arithmetic.js") for url in asked)
    assert [url for url in asked if not url.startswith(("file://", "data:"))] == []
