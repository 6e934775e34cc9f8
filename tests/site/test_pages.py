"""Every page of the site, in a browser: nothing is missing, fetched, or sticks out."""

import pytest

from tests.support import browser
from tests.support.browser import DESK, PHONE, TABLET
from tests.support.effort import exhaustive
from tests.support.paths import DOCS

pytestmark = browser.MARKS

PAGES = sorted(path.stem for path in DOCS.glob("*.md"))

STICKS_OUT = """
const scrolls = (one) => one !== null && (
  getComputedStyle(one).overflowX !== 'visible' ||
  scrolls(one.parentElement.closest('.md-content *')));
const width = document.documentElement.clientWidth;
return [...document.querySelectorAll('.md-content *')].filter((one) =>
  one.checkVisibility() && one.getBoundingClientRect().right > width + 1 && !scrolls(one)
).map((one) => `${one.tagName} ${one.className} ${one.textContent.trim().slice(0, 40)}`);
"""


def test_all_pages_are_known(pages):
    built = {path.stem for path in pages.site.rglob("*.html")} - {"404"}
    assert built == set(PAGES)
    assert len(built) >= 20


MISSING = """
return Promise.all([...document.images].map((image) => {
  image.loading = 'eager';
  const is = () => image.naturalWidth > 0 ? null : image.src;
  return image.decode().then(is, () => image.src);
})).then((sources) => sources.filter(Boolean));
"""


def fits(pages):
    assert pages.run("return document.documentElement.scrollWidth - innerWidth") <= 0
    assert pages.run(STICKS_OUT) == []


def is_complete_and_quiet(pages, name):
    assert pages.run(MISSING) == []
    assert pages.console() == []
    requests = pages.requests()
    assert any(url.endswith(f"/{name}.html") for url in requests)
    assert [url for url in requests if not url.startswith(("file://", "data:"))] == []


@pytest.mark.parametrize("name", PAGES)
def test_a_page_on_a_desk_and_on_a_phone(pages, name):
    pages.open(f"{name}.html", size=DESK)
    fits(pages)
    pages.resize(PHONE)
    fits(pages)
    is_complete_and_quiet(pages, name)


@exhaustive("a page that is opened on a phone is seldom another than one that is moved there")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, TABLET, DESK], ids=["phone", "tablet", "desk"])
@pytest.mark.parametrize("name", PAGES)
def test_a_page_of_every_width_and_scheme(pages, name, size, dark):
    pages.open(f"{name}.html", size=size, dark=dark)
    fits(pages)
    is_complete_and_quiet(pages, name)
