"""The explorer by link, by keyboard, and with what makes no sense."""

import pytest

from tailavg import AnytimeWindow
from tailavg.core.clock import starts_at
from tests.support import browser

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


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        (
            "#window=100&method=anytime&accumulators=5&t=777",
            {"kind": "fixed", "k": "100", "accumulators": "5", "t": "777"},
        ),
        (
            "#window=1.0&method=exponential&t=10",
            {"kind": "growing", "c": "1", "method": "exponential"},
        ),
        ("#window=1&method=exact&t=10", {"kind": "fixed", "k": "1", "method": "exact"}),
        (
            "#window=0.3&at_most=500&method=paper&accumulators=8&t=1000000",
            {"kind": "capped", "c": "0.3", "atMost": "500", "method": "paper", "t": "1000000"},
        ),
        (
            "#window=0.3&method=anytail&accumulators=7&t=42&numbers=124000000",
            {"method": "anytail", "accumulators": "7", "numbers": "124000000"},
        ),
    ],
)
def test_a_link_restores_the_settings(pages, link, expected):
    pages.explore(link)
    shows(pages, **expected)
    assert pages.run("return settings.toHash(settings.fromHash(location.hash))") == link
    assert pages.console() == []


@pytest.mark.parametrize(
    "link",
    [
        "",
        "#",
        "#in-numbers",
        "#=",
        "#&&&",
        "#window=",
        "#window=0&t=0",
        "#window=-5&t=-1",
        "#t=1e99&window=2.5",
        "#window=NaN&t=Infinity&accumulators=x",
        "#method=constructor",
        "#method=__proto__",
        "#accumulators=1",
        "#accumulators=99&t=1.5",
        "#%E0%A4%A&window=%",
        "#window=1e-9",
        "#<script>alert(1)</script>",
        "#numbers=0",
        "#window=" + 400 * "9",
    ],
)
def test_nonsense_is_the_usual(pages, link):
    pages.explore(link)
    shows(pages, **USUAL)
    assert pages.stat("effective") == "287.5"
    assert pages.console() == []


def test_nonsense_beside_sense(pages):
    pages.explore("#window=100&method=anytail&accumulators=2&t=50")  # an AnyTail reads fractions
    shows(pages, kind="fixed", k="100", method="anytime", accumulators="2", t="50")


def test_back_and_forward(pages):
    pages.explore()
    pages.browser.find_element("css selector", "[value=exponential]").click()
    pages.wait("return location.hash.includes('exponential')")
    pages.browser.find_element("css selector", "[value=fixed]").click()
    pages.wait("return location.hash.includes('window=200')")
    pages.browser.back()
    pages.rest()
    shows(pages, kind="growing", method="exponential")
    pages.browser.back()
    pages.rest()
    shows(pages, **USUAL)
    assert pages.stat("cold") == "3 means"
    pages.browser.forward()
    pages.browser.forward()
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


def press(pages, *keys):
    for key in keys:
        pages.browser.switch_to.active_element.send_keys(key)


def test_tab_reaches_every_control_in_order(pages):
    from selenium.webdriver.common.keys import Keys

    pages.explore("#window=0.25&at_most=1000&t=1150")
    order = []
    for _ in range(80):
        press(pages, Keys.TAB)
        if (now := focused(pages)) is not None:
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


def test_every_control_has_a_name(pages):
    pages.explore()
    unnamed = pages.run(
        """return [...document.querySelectorAll('.explorer :is(input, button)')].filter(one =>
             !(one.labels?.length || one.ariaLabel || one.textContent.trim())).map(one => one.id)"""
    )
    assert unnamed == []


def test_keys_move_the_step(pages):
    from selenium.webdriver.common.keys import Keys

    pages.explore("#window=0.25&t=1219")
    pages.run("document.getElementById('x-t-range').focus()")
    rule, before = AnytimeWindow(0.25), pages.stat("mean")
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
        press(pages, key)
        pages.rest()
        assert pages.settings()["t"] == str(t)
        assert pages.blocks() == starts_at(rule, t)
        assert pages.run("return document.activeElement.ariaValueText") == f"{t:,}"
    assert pages.stat("mean") != before
    pages.wait("return location.hash.endsWith('t=1000000')")


def test_keys_choose_a_method_and_accumulators(pages):
    from selenium.webdriver.common.keys import Keys

    pages.explore("#window=0.25&t=1150")
    pages.run("document.querySelector('[value=anytime]').focus()")
    press(pages, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    pages.rest()
    shows(pages, method="anytail", accumulators="12")
    press(pages, Keys.TAB, Keys.HOME, Keys.ARROW_RIGHT)
    pages.rest()
    shows(pages, accumulators="7")
    press(pages, Keys.SHIFT + Keys.TAB, Keys.ARROW_LEFT)
    pages.rest()
    shows(pages, method="paper", accumulators="3")


def type_into(pages, name, text):
    from selenium.webdriver.common.keys import Keys

    pages.explore("#window=0.25&t=1150")
    pages.find(name).click()
    press(pages, Keys.CONTROL + "a", Keys.DELETE)
    press(pages, *text)


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
def test_typing(pages, name, typed, value):
    type_into(pages, name, typed)
    pages.rest()
    assert pages.text("#x-error") == ""
    assert pages.run("return document.activeElement.value") == typed  # left alone meanwhile
    pages.run("document.activeElement.blur()")
    shows(pages, **{name: value})


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
def test_typing_nonsense(pages, name, typed, expected):
    type_into(pages, name, typed)
    said = pages.text("#x-error")
    assert expected in said
    assert f"got “{typed}”" in said
    assert pages.find(name).get_attribute("aria-invalid") == "true"
    pages.run("document.activeElement.blur()")
    pages.rest()
    assert pages.text("#x-error") == ""
    if name == "t":  # the first digits of 1e7 and 2.5 made sense
        assert pages.settings()["t"] in ("1150", "1", "2")
    else:
        shows(pages, **{name: USUAL[name]})
    assert pages.console() == []
