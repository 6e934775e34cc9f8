import shutil

import pytest

from tests.support.browser import INSTALL, Pages, build, chromium, start
from tests.support.paths import ROOT


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    if not (ROOT / "mkdocs.yml").exists():
        pytest.skip("the documentation is not here")
    for found, what in ((chromium(), "a browser"), (shutil.which("chromedriver"), "its driver")):
        if found is None:
            pytest.skip(f"the site needs {what}, which is not found; install it: {INSTALL}")
    browser = start(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.quit()


@pytest.fixture(scope="session")
def pages(browser, tmp_path_factory):
    site = tmp_path_factory.mktemp("site")
    build(site)
    return Pages(browser, site)


@pytest.fixture(scope="module")
def explorer(pages):
    """The explorer, open."""
    pages.explore()
    return pages
