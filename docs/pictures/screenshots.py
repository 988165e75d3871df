"""The screenshots of the report page, from the live example: python docs/pictures/screenshots.py.

Needs Playwright and Chromium (`make test-browser` installs them) and Pillow.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

PICTURES = Path(__file__).parent
EXAMPLE = PICTURES.parent / "example.html"
CHROMIUM = os.environ.get("FEDCOR_CHROMIUM", "/usr/bin/chromium")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu"]
WIDTH = 1160


def main() -> None:
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = opened(browser, "light")
        save(page, "page-verdict.png", 0, bottom(page, "#curve-chart"))
        page = opened(browser, "dark")
        page.locator("#stepper select").select_option(label="fedcor, seed 1")
        page.evaluate("document.activeElement.blur(); scrollTo(0, 0); Page.step(52)")
        save(page, "page-why.png", top(page, "#why"), bottom(page, "#heat"))
        browser.close()


def opened(browser: Browser, scheme: Any) -> Page:
    """The example, in which nothing sticks to the top of the window."""
    page = browser.new_page(viewport={"width": WIDTH, "height": 800}, color_scheme=scheme)
    page.goto(EXAMPLE.as_uri())
    page.wait_for_selector("html[data-ready=yes]")
    page.evaluate(
        "document.querySelectorAll('.top, .stepper').forEach(e => e.style.position = 'static')"
    )
    return page


def top(page: Page, part: str) -> float:
    return float(page.evaluate(f"document.querySelector('{part}').getBoundingClientRect().top"))


def bottom(page: Page, part: str) -> float:
    return float(page.evaluate(f"document.querySelector('{part}').getBoundingClientRect().bottom"))


def save(page: Page, name: str, start: float, end: float) -> None:
    """A part of the page, in 256 colours."""
    path = PICTURES / name
    clip: Any = {"x": 0, "y": start, "width": WIDTH, "height": end - start + 10}
    page.screenshot(path=path, full_page=True, clip=clip)
    with Image.open(path) as picture:
        few = picture.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    few.save(path, optimize=True)


if __name__ == "__main__":
    main()
