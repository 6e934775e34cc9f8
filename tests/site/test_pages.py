"""Every page of the site, in a browser: nothing is missing, fetched, or sticks out."""

import pytest

from tests.support import browser
from tests.support.browser import DESK, PHONE
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


@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
@pytest.mark.parametrize("name", PAGES)
def test_a_page(pages, name, size):
    pages.open(f"{name}.html", size=size)
    pages.wait("return document.readyState === 'complete'")
    missing = pages.run(
        """return Promise.all([...document.images].map((one) => {
             one.loading = 'eager';
             return one.decode().then(() => one.naturalWidth > 0 ? null : one.src, () => one.src);
           })).then((all) => all.filter(Boolean))"""
    )
    assert missing == []
    assert pages.run("return document.documentElement.scrollWidth - innerWidth") <= 0
    assert pages.run(STICKS_OUT) == []
    assert pages.console() == []
    asked = pages.requests()
    assert any(url.endswith(f"/{name}.html") for url in asked)
    assert [url for url in asked if not url.startswith(("file://", "data:"))] == []
