"""The explorer by link, by keyboard, and with what makes no sense."""

import pytest

from tailavg import AnytimeWindow
from tailavg.core.clock import starts_at
from tests.support import browser
from tests.support.effort import some

pytestmark = browser.MARKS

USUAL = {
    "kind": "growing",
    "method": "anytime",
    "c": "0.25",
    "accumulators": "3",
    "t": "1150",
    "numbers": "",
}


def shows(pages, **expected):
    got = pages.settings()
    assert {name: got[name] for name in expected} == expected


LINKS = {
    "#window=100&method=anytime&accumulators=5&t=777": {
        "kind": "fixed",
        "k": "100",
        "accumulators": "5",
        "t": "777",
    },
    "#window=1.0&method=exponential&t=10": {"kind": "growing", "c": "1", "method": "exponential"},
    "#window=1&method=exact&t=10": {"kind": "fixed", "k": "1", "method": "exact"},
    "#window=0.3&at_most=500&method=paper&accumulators=8&t=1000000": {
        "kind": "capped",
        "c": "0.3",
        "atMost": "500",
        "method": "paper",
        "t": "1000000",
    },
    "#window=0.3&method=anytail&accumulators=7&t=42&numbers=124000000": {
        "method": "anytail",
        "accumulators": "7",
        "numbers": "124000000",
    },
    "#window=0.3&method=freshest&accumulators=7&t=42": {
        "kind": "growing",
        "c": "0.3",
        "method": "freshest",
        "accumulators": "7",
    },
}


def shows_settings(pages, link):
    shows(pages, **LINKS[link])
    assert pages.run("return settings.toHash(settings.fromHash(location.hash))") == link
    assert pages.console() == []


@pytest.mark.parametrize("link", list(LINKS)[some(3, 0) :])
def test_to_open_a_link_restores_the_settings(pages, link):
    pages.explore(link)
    shows_settings(pages, link)


@pytest.mark.parametrize("link", LINKS)
def test_to_follow_a_link_restores_the_settings(explorer, link):
    explorer.follow(link)
    shows_settings(explorer, link)


NO_SETTINGS = ["", "#in-numbers", "#<script>alert(1)</script>"]
NONSENSE = [
    "#%E0%A4%A&window=%",
    "#method=__proto__",
    "#window=NaN&t=Infinity&accumulators=x",
    "#",
    "#=",
    "#&&&",
    "#window=",
    "#window=0&t=0",
    "#window=-5&t=-1",
    "#t=1e99&window=2.5",
    "#method=constructor",
    "#accumulators=1",
    "#accumulators=99&t=1.5",
    "#window=1e-9",
    "#numbers=0",
    "#window=" + 400 * "9",
]


def shows_the_usual(pages):
    shows(pages, **USUAL)
    assert pages.stat("effective") == "287.5"
    assert pages.console() == []


def test_nonsense_means_the_usual(explorer):
    read = "return arguments[0].map((hash) => settings.toHash(settings.fromHash(hash)))"
    usual = "#window=0.25&method=anytime&accumulators=3&t=1150"
    for link, meant in zip(NONSENSE, explorer.run(read, NONSENSE), strict=True):
        assert meant == usual, link


@pytest.mark.parametrize("link", NONSENSE[:3])
def test_to_follow_nonsense_shows_the_usual(explorer, link):
    explorer.follow("#window=100&method=exact&t=777")
    explorer.follow(link)
    shows_the_usual(explorer)


@pytest.mark.parametrize("link", [*NO_SETTINGS, *some([], NONSENSE)])
def test_to_open_nonsense_shows_the_usual(pages, link):
    pages.explore(link)
    shows_the_usual(pages)


@pytest.mark.parametrize("method", ["anytail", "freshest"])  # which read fractions only
def test_nonsense_beside_sense(explorer, method):
    explorer.follow(f"#window=100&method={method}&accumulators=2&t=50")
    shows(explorer, kind="fixed", k="100", method="anytime", accumulators="2", t="50")
    explorer.follow(f"#window=0.25&at_most=100&method={method}&t=50")
    shows(explorer, kind="capped", atMost="100", method="anytime", accumulators="3", t="50")
    explorer.follow(f"#window=0.25&method={method}&accumulators=5&t=50")  # it needs six
    shows(explorer, kind="growing", method=method, accumulators="12", t="50")


DISABLED = "return [...document.querySelectorAll('[name=method]:disabled')].map((one) => one.value)"


@pytest.mark.parametrize("method", ["anytail", "freshest"])
def test_a_fixed_window_disables_the_methods_that_read_fractions(explorer, method):
    explorer.follow(f"#window=0.25&method={method}&t=1150")
    assert explorer.run(DISABLED) == []
    for kind in ("fixed", "capped"):
        explorer.follow(f"#window=0.25&method={method}&t=1150")
        explorer.browser.find_element("css selector", f"[value={kind}]").click()
        explorer.rest()
        shows(explorer, kind=kind, method="anytime", accumulators="3")
        assert explorer.run(DISABLED) == ["anytail", "freshest"]
        assert "needs “the last fraction”" in explorer.text("#x-method-hint")


def test_back_and_forward(pages):
    pages.explore()
    pages.browser.find_element("css selector", "[value=exponential]").click()
    pages.wait("location.hash.includes('window=0.25&method=exponential')")
    pages.browser.find_element("css selector", "[value=fixed]").click()
    pages.wait("location.hash.includes('window=200&method=exponential')")
    pages.browser.back()
    pages.wait("location.hash.includes('window=0.25&method=exponential')")
    pages.rest()
    shows(pages, kind="growing", method="exponential")
    pages.browser.back()
    pages.wait("location.hash === ''")
    pages.rest()
    shows(pages, **USUAL)
    assert pages.stat("cold") == "3 means"
    pages.browser.forward()
    pages.browser.forward()
    pages.wait("location.hash.includes('window=200&method=exponential')")
    pages.rest()
    shows(pages, kind="fixed", method="exponential")
    assert pages.stat("cold") == "1 mean"
    pages.run("location.hash = 'in-numbers'")  # a heading, not a setting
    pages.rest()
    shows(pages, kind="fixed", method="exponential")


def focused(pages):
    return pages.run(
        """const one = document.activeElement;
        if (!one.closest('.explorer')) return null;
        const drawn = getComputedStyle(one.type === 'radio' ? one.nextElementSibling : one);
        return [one.id.replace('x-', '') || `${one.name} ${one.value}`,
                drawn.outlineStyle !== 'none' && parseFloat(drawn.outlineWidth) >= 2];"""
    )


def test_tab_reaches_every_control_in_order(explorer):
    from selenium.webdriver.common.keys import Keys

    explorer.follow("#window=0.25&at_most=1000&t=1150")
    explorer.run("const form = document.getElementById('x-form'); form.tabIndex = -1; form.focus()")
    order = []
    for _ in range(40):
        explorer.press(Keys.TAB)
        if (now := focused(explorer)) is not None:
            order.append(now)
        elif order and order[-1][0] == "shell-copy":
            break
    assert [name for name, _ in order] == [
        *("kind capped", "c-range", "c", "atMost-range", "atMost"),
        *("method anytime", "accumulators-range", "accumulators"),
        *("t-range", "t", "previous", "play", "next", "link"),
        *("numbers", "python-copy", "torch-copy", "optax-copy", "shell-copy"),
    ]
    assert [name for name, outlined in order if not outlined] == []


def test_every_control_has_a_name(explorer):

    unnamed = explorer.run(
        """return [...document.querySelectorAll('.explorer :is(input, button)')].filter(one =>
             !(one.labels?.length || one.ariaLabel || one.textContent.trim())).map(one => one.id)"""
    )
    assert unnamed == []


def test_keys_move_the_step(explorer):
    from selenium.webdriver.common.keys import Keys

    explorer.follow("#window=0.25&t=1219")
    explorer.run("document.getElementById('x-t-range').focus()")
    rule, before = AnytimeWindow(0.25), explorer.stat("mean")
    for key, t in [
        (Keys.ARROW_RIGHT, 1220),
        (Keys.ARROW_UP, 1221),
        (Keys.ARROW_LEFT, 1220),
        (Keys.PAGE_UP, 1342),
        (Keys.HOME, 1),
        (Keys.ARROW_DOWN, 1),
        (Keys.END, 1_000_000),
        (Keys.ARROW_RIGHT, 1_000_000),
    ]:
        explorer.press(key)
        explorer.rest()
        assert explorer.settings()["t"] == str(t)
        assert explorer.blocks() == starts_at(rule, t)
        assert explorer.run("return document.activeElement.ariaValueText") == f"{t:,}"
    assert explorer.stat("mean") != before
    explorer.wait("location.hash.endsWith('t=1000000')")


def test_keys_choose_a_method_and_accumulators(explorer):
    from selenium.webdriver.common.keys import Keys

    explorer.follow("#window=0.25&t=1150")
    explorer.run("document.querySelector('[value=anytime]').focus()")
    explorer.press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    explorer.rest()
    shows(explorer, method="anytail", accumulators="12")
    explorer.press(Keys.TAB, Keys.HOME, Keys.ARROW_RIGHT)
    explorer.rest()
    shows(explorer, accumulators="7")
    explorer.browser.switch_to.active_element.send_keys(Keys.SHIFT + Keys.TAB)
    explorer.press(Keys.ARROW_RIGHT)
    explorer.rest()
    shows(explorer, method="freshest", accumulators="7")  # the same blocks, read in another way
    explorer.press(Keys.ARROW_LEFT, Keys.ARROW_LEFT)
    explorer.rest()
    shows(explorer, method="paper", accumulators="3")


def type_into(explorer, name, text):
    from selenium.webdriver.common.keys import Keys

    explorer.follow("#window=0.25&t=1150")
    explorer.run("document.getElementById(`x-${arguments[0]}`).select()", name)
    explorer.press(Keys.DELETE, *text)


def leave(explorer):
    explorer.run("document.activeElement.blur()")
    explorer.rest()


@pytest.mark.parametrize(
    ("name", "typed", "value"),
    [
        ("t", "1e3", "1000"),
        ("t", "12,345", "12345"),
        ("t", "1", "1"),
        ("c", "0.07", "0.07"),
        ("c", "1.0", "1"),
        ("accumulators", "16", "16"),
        ("numbers", "7e9", "7000000000"),
    ],
)
def test_typing(explorer, name, typed, value):
    type_into(explorer, name, typed)
    explorer.rest()
    assert explorer.text("#x-error") == ""
    assert explorer.run("return document.activeElement.value") == typed  # left alone meanwhile
    leave(explorer)
    shows(explorer, **{name: value})


@pytest.mark.parametrize(
    ("name", "typed", "expected"),
    [
        ("t", "abc", "a whole number from 1 to 1,000,000"),
        ("t", "0", "a whole number"),
        ("t", "2.5", "a whole number"),
        ("t", "-3", "a whole number"),
        ("t", "1e7", "from 1 to 1,000,000"),
        ("c", "2", "a fraction from 0.001 to 1"),
        ("c", "", "a fraction"),
        ("accumulators", "1", "from 2 to 16"),
        ("numbers", "many", "such as 7e9"),
    ],
)
def test_typing_nonsense(explorer, name, typed, expected):
    type_into(explorer, name, typed)
    message = explorer.text("#x-error")
    assert expected in message
    assert f"got “{typed}”" in message
    assert explorer.find(name).get_attribute("aria-invalid") == "true"
    leave(explorer)
    assert explorer.text("#x-error") == ""
    if name == "t":  # the first digits of 1e7 and 2.5 made sense
        assert explorer.settings()["t"] in ("1150", "1", "2")
    else:
        shows(explorer, **{name: USUAL[name]})
    assert explorer.console() == []
