"""Text that others wrote, made safe to show: names and reasons of clients, the content of files.

Such text may hold line breaks that forge a line of a log, escape codes that a terminal obeys, or
characters that are not seen or that turn the reading direction. They are shown as in a Python
string: `\\x1b`, `\\u202e`. Matplotlib and spreadsheets read some texts as formulas; `for_figure`
and `for_csv` prevent that. Rich reads brackets as markup: it is given `rich.text.Text` objects.
"""

from __future__ import annotations

from collections.abc import Sequence

LONGEST = 300  # characters
_CUT = "..."
_FORMULA = ("=", "+", "-", "@")  # how a formula of a spreadsheet begins


def one_line(text: object, most: int | None = LONGEST) -> str:
    r"""`text` on one line, of printable characters alone.

    Args:
        text: Anything; it is shown as `str` does.
        most: The most characters; what is longer is cut, and ends with three dots. None for any
            number.

    Example:
        >>> print(one_line("a\nb\x1b[31m"))
        a\nb\x1b[31m
    """
    whole = str(text)
    # Cut before the work as well: each character becomes at most ten.
    shown = "".join(map(_visible, whole if most is None else whole[: most + 1]))
    return shown if most is None or len(shown) <= most else shown[: most - len(_CUT)] + _CUT


def _visible(character: str) -> str:
    # Not printable are, beside control characters: surrogates, direction marks, zero-width
    # characters, separators other than the space, and what Unicode does not define.
    if character.isprintable():
        return character
    return character.encode("unicode_escape").decode("ascii")


def lines(text: object) -> str:
    """`text` with its line breaks, each line of printable characters alone."""
    return "\n".join(one_line(line, None) for line in str(text).split("\n"))


def listed(names: Sequence[str], most: int = 5) -> str:
    """A list of names that stays short.

    Example:
        >>> listed(["a", "b", "c", "d"], most=2)
        'a, b and 2 more'
    """
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def for_figure(text: object, most: int | None = LONGEST) -> str:
    r"""As `one_line`, for matplotlib: a dollar begins no formula, no label is hidden.

    Example:
        >>> print(for_figure("$x$"))
        \$x\$
    """
    shown = one_line(text, most).replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") or not shown else shown


def for_csv(text: object) -> str:
    """As `one_line`, of any length, for CSV: a spreadsheet reads no formula in it.

    A text that begins with =, +, - or @ gets an apostrophe before it, which spreadsheets take as
    the sign of a plain text.

    Example:
        >>> for_csv("=1+1")
        "'=1+1"
    """
    shown = one_line(text, None)
    return f"'{shown}" if shown.lstrip().startswith(_FORMULA) else shown


BYTE_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))
TIME_UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))


def unit_for(largest: float, units: Sequence[tuple[float, str]]) -> tuple[float, str]:
    """The size and name of the unit in which values up to `largest` are written.

    Bytes are written in the largest unit of which there is one, times in that of which there are
    two: 90 s, not 1.50 min.
    """
    least = 2.0 if units is TIME_UNITS else 1 - 5e-4
    return next((unit for unit in units if largest >= least * unit[0]), units[-1])


def in_units(
    values: Sequence[float], units: Sequence[tuple[float, str]], sign: str = ""
) -> tuple[list[str], str]:
    """The values in one unit, the largest with three digits, and the name of the unit."""
    largest = max(map(abs, values))
    size, unit = unit_for(largest, units)
    digits = 0 if unit == "B" else sum(largest / size < bound for bound in (99.95, 9.995))
    return [f"{value / size:{sign}z.{digits}f}" for value in values], unit


def bytes_text(count: float) -> str:
    """Three digits and a unit: `9.64 MB`."""
    (number,), unit = in_units([count], BYTE_UNITS)
    return f"{number} {unit}"


def seconds_text(seconds: float) -> str:
    """Three digits and a unit: `41.0 s`, `12.3 min`, `2.31 h`, `1.20 d`."""
    (number,), unit = in_units([seconds], TIME_UNITS)
    return f"{number} {unit}"


def counted(count: int, noun: str) -> str:
    """A number of things.

    Example:
        >>> counted(1, "node"), counted(2, "node")
        ('1 node', '2 nodes')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
