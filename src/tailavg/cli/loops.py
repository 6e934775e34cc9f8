"""The loops that turn text to numbers and back: plain Python, compiled by numba if it is installed.

They are exact: a number is what `float` reads and `%.12g` writes. What is rare they leave to
Python, and say so. Text is an array of bytes. Decimals are held in 64 bits without a sign; their
products are taken in halves, since there is nothing wider.
"""

from __future__ import annotations

from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np

from tailavg.numpy import compiling

__all__ = ["LONG", "WIDEST", "compiled", "plain"]

LONG = 4 << 20
"""How many bytes are converted before numba is imported, which takes half a second."""

WIDEST = 20
"""The most bytes of a number in the output, with the separator: -1.23456789012e-300."""

_NEWLINE, _TAB, _COMMA, _PLUS, _MINUS, _DOT, _ZERO, _E, _SMALL_E = b"\n\t,+-.0Ee"
_FIRST, _LAST = -342, 308  # the powers of ten that a decimal of 19 digits may need
_NO, _ONE, _TWO, _THREE, _TEN = (np.uint64(i) for i in (0, 1, 2, 3, 10))
_HALF, _LOW = np.uint64(32), np.uint64((1 << 32) - 1)
_NEAR = np.uint64(0x1FF)  # nine ones: a carry may reach the bits that count
_SHIFT, _TOP = np.uint64(9), np.uint64(63)
_WHOLE = np.uint64(1 << 53)  # up to here a float holds all integers
_POWERS = 10.0 ** np.arange(23)  # the powers that a float holds exactly
_TWOS = np.ldexp(1.0, np.arange(-1074, 972))
_PAIRS = np.frombuffer(b"".join(b"%02d" % i for i in range(100)), np.uint8)
_SPLIT = 2.0**27 + 1.0


def _fives() -> Any:
    """The first 128 bits of each power of five, in two halves."""
    found = np.empty((_LAST - _FIRST + 1, 2), np.uint64)
    for q in range(_FIRST, _LAST + 1):
        power = 5 ** abs(q)
        if q < 0:  # rounded up in the last of 128 bits, where a number may be half-way
            bits = power.bit_length() + 127 if q >= -27 else 2 * power.bit_length() + 128
            power = (1 << bits) // power + 1
        excess = power.bit_length() - 128
        power = power >> excess if excess > 0 else power << -excess
        found[q - _FIRST] = power >> 64, power & ((1 << 64) - 1)
    return found


_FIVES = _fives()


def product(a: Any, b: Any) -> Any:
    """The upper and the lower half of a product."""
    a_high, a_low, b_high, b_low = a >> _HALF, a & _LOW, b >> _HALF, b & _LOW
    low = a_low * b_low
    middle = a_high * b_low + (low >> _HALF)
    other = a_low * b_high + (middle & _LOW)
    high = a_high * b_high + (middle >> _HALF) + (other >> _HALF)
    return high, (other << _HALF) | (low & _LOW)


def decimal(digits: Any, power: int) -> Any:
    """The float nearest to `digits` times a power of ten; -1.0 if it is out of the usual range.

    By the method of Eisel and Lemire ("Number parsing at a gigabyte per second", 2021), which is
    exact for up to 19 digits (Mushtak and Lemire, "Fast number parsing without fallback", 2023).
    """
    if digits <= _WHOLE and -22 <= power <= 22:  # two exact numbers: rounded once
        whole = float(np.int64(digits))
        return whole * _POWERS[power] if power >= 0 else whole / _POWERS[-power]
    if digits == _NO:
        return 0.0
    if power < _FIRST or power > _LAST:
        return -1.0
    zeros = 0  # before the first bit
    step = 32
    while step:
        if digits >> np.uint64(64 - step) == _NO:
            digits <<= np.uint64(step)
            zeros += step
        step >>= 1
    row = power - _FIRST
    high, low = product(digits, _FIVES[row, 0])
    if high & _NEAR == _NEAR:
        more, _ = product(digits, _FIVES[row, 1])
        low += more
        if low < more:
            high += _ONE
    upper = high >> _TOP
    bits = high >> (upper + _SHIFT)  # 54, the last one to round by
    two = ((217706 * power) >> 16) + 63 + np.int64(upper) - zeros
    if two < -1021 or two > 1022:
        return -1.0
    halfway = low <= _ONE and -4 <= power <= 23 and bits << (upper + _SHIFT) == high
    if halfway and bits & _THREE == _ONE:  # between two floats: to the even one
        bits -= _ONE
    bits = (bits + (bits & _ONE)) >> _ONE
    return float(np.int64(bits)) * _TWOS[two - 52 + 1074]


def parse(text: Any, place: int, width: int, numbers: Any, odd: Any) -> int:
    """The numbers in a column of CSV without quotes; -1 if a row has not `width` cells.

    Returns how many cells are left to Python: of each, `odd` has the row, and where it starts and
    ends. `text` ends with a line end; `numbers` and `odd` have a place for each line.
    """
    at = found = 0
    for row in range(len(numbers)):
        for _ in range(place):
            while text[at] != _COMMA:
                if text[at] == _NEWLINE:
                    return -1
                at += 1
            at += 1
        start = at
        negative = text[at] == _MINUS
        if negative or text[at] == _PLUS:
            at += 1
        first = at
        digits, power = _NO, 0
        while True:
            digit = text[at] - np.uint8(_ZERO)
            if digit > 9:
                break
            digits = digits * _TEN + np.uint64(digit)
            at += 1
        count = at - first
        if text[at] == _DOT:
            at += 1
            after = at
            while True:
                digit = text[at] - np.uint8(_ZERO)
                if digit > 9:
                    break
                digits = digits * _TEN + np.uint64(digit)
                at += 1
            power = after - at
            count -= power
        good = count > 0
        if count > 19:  # zeros at the start are none of them
            while count > 19 and (text[first] == _ZERO or text[first] == _DOT):
                count -= text[first] == _ZERO
                first += 1
            good = count <= 19
        if text[at] == _SMALL_E or text[at] == _E:
            at += 1
            below = text[at] == _MINUS
            if below or text[at] == _PLUS:
                at += 1
            after, exponent = at, 0
            while True:
                digit = text[at] - np.uint8(_ZERO)
                if digit > 9:
                    break
                exponent = exponent * 10 + int(digit) if exponent < 10_000 else exponent
                at += 1
            good = good and at > after
            power += -exponent if below else exponent
        number = -1.0
        if good and (text[at] == _NEWLINE or text[at] == _COMMA):
            number = decimal(digits, power)
        if number < 0.0:
            while text[at] != _NEWLINE and text[at] != _COMMA:
                at += 1
            odd[found, 0], odd[found, 1], odd[found, 2] = row, start, at
            found += 1
        numbers[row] = -number if negative else number
        cells = place + 1
        while text[at] != _NEWLINE:
            cells += text[at] == _COMMA
            at += 1
        if cells != width:
            return -1
        at += 1
    return found


def twelve_digits(numbers: Any, wholes: Any, exponents: Any) -> int:
    """The 12 significant digits of each number as an integer, and the exponent of the first one.

    Returns how many numbers are left to Python: their integer is -1.
    """
    found = exponent = 0
    for i in range(len(numbers)):
        size = abs(numbers[i])
        if not 1e-11 <= size < 1e12:
            wholes[i], exponents[i] = 0, 0
            if size != 0.0:
                wholes[i] = -1
                found += 1
            continue
        # averages change slowly: begin with the exponent of the last one
        power = _POWERS[11 - exponent]
        scaled = size * power
        while scaled >= 1e12:
            exponent += 1
            power = _POWERS[11 - exponent]
            scaled = size * power
        while scaled < 1e11:
            exponent -= 1
            power = _POWERS[11 - exponent]
            scaled = size * power
        # what the product rounded off, by Dekker: both factors in halves
        high = size * _SPLIT
        high -= high - size
        low = size - high
        power_high = power * _SPLIT
        power_high -= power_high - power
        power_low = power - power_high
        lost = high * power_high - scaled
        lost += high * power_low
        lost += low * power_high
        lost += low * power_low
        whole = np.int64(scaled)
        above = (scaled - float(whole)) - 0.5 + lost
        if above > 0.0 or (above == 0.0 and whole & 1):
            whole += 1
        wholes[i], exponents[i] = whole, exponent
        if whole == 1_000_000_000_000:
            wholes[i], exponents[i] = 100_000_000_000, exponent + 1
            if exponent == 11:  # which is written 1e+12
                wholes[i] = -1
                found += 1
    return found


def write(numbers: Any, wholes: Any, exponents: Any, width: int, texts: Any, out: Any) -> int:
    """Write numbers, `width` to a line, with tabs between them; returns how many bytes that takes.

    Those left to Python are the rows of `texts`, filled up with zeros.
    """
    digits = np.empty(12, np.uint8)
    at = taken = column = 0
    for i in range(len(numbers)):
        whole, exponent = wholes[i], exponents[i]
        if whole < 0:
            place = 0
            while place < texts.shape[1] and texts[taken, place] != 0:
                out[at] = texts[taken, place]
                at += 1
                place += 1
            taken += 1
        else:
            if np.signbit(numbers[i]):
                out[at] = _MINUS
                at += 1
            upper = whole // 1_000_000
            for start, part in ((0, upper), (6, whole - upper * 1_000_000)):
                pair = part // 10_000
                digits[start], digits[start + 1] = _PAIRS[2 * pair], _PAIRS[2 * pair + 1]
                part -= pair * 10_000
                pair = part // 100
                digits[start + 2], digits[start + 3] = _PAIRS[2 * pair], _PAIRS[2 * pair + 1]
                pair = part - pair * 100
                digits[start + 4], digits[start + 5] = _PAIRS[2 * pair], _PAIRS[2 * pair + 1]
            last = 11
            while last > 0 and digits[last] == _ZERO:
                last -= 1
            lead = exponent + 1 if exponent >= -4 else 1  # the digits before the point
            if lead <= 0:
                out[at] = _ZERO
                at += 1
            for place in range(lead):
                out[at] = digits[place]
                at += 1
            if last >= lead:
                out[at] = _DOT
                at += 1
            for _ in range(-lead):
                out[at] = _ZERO
                at += 1
            for place in range(max(lead, 0), last + 1):
                out[at] = digits[place]
                at += 1
            if exponent < -4:
                out[at], out[at + 1] = _SMALL_E, _MINUS
                out[at + 2], out[at + 3] = _PAIRS[-2 * exponent], _PAIRS[-2 * exponent + 1]
                at += 4
        column += 1
        out[at] = _TAB
        if column == width:
            out[at] = _NEWLINE
            column = 0
        at += 1
    return at


_LOOPS: list[Any] = [product, decimal, parse, twelve_digits, write]

plain = compiling.together(_LOOPS)
"""The loops as they are."""


@lru_cache
def compiled() -> SimpleNamespace | None:
    """The loops, compiled; None if numba does not work."""
    return compiling.compiled(_LOOPS, globals())
