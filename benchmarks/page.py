"""The report page of many and of long runs: its size, the time to make it, and its first paint.

    python benchmarks/page.py

The runs are made up. The time to make a page is that of the processor; as a multiple of the time
to parse its records, it can be compared between machines. The first paint is that of Chromium,
where Playwright is installed (`make test-browser` installs it).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

from fedcor.reporting.page import render_page
from fedcor.reporting.page.data import page_data
from fedcor.runs.record import RECORD, read_runs

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from page_runs import write_run

SELECTORS = ("random", "afl", "power_of_choice", "fedcor")
PAINT = "performance.getEntriesByName('first-contentful-paint')[0].startTime"


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        many, long = Path(name) / "many", Path(name) / "long"
        for seed in range(1, 6):
            for selector in SELECTORS:
                write_run(many, selector, seed, rounds=500, clients=100, picks=10)
        measure("20 runs x 500 rounds x 100 clients", many)
        write_run(long, "fedcor", 1, rounds=2000, clients=1000, picks=50)
        write_run(long, "random", 1, rounds=2000, clients=1000, picks=50)
        measure("2 runs x 2000 rounds x 1000 clients", long)


def measure(what: str, folder: Path) -> None:
    """Prints the numbers of one page."""
    start = time.process_time()
    for path in folder.rglob(RECORD):
        for line in path.read_text(encoding="utf-8").splitlines():
            json.loads(line)
    parsed = time.process_time() - start
    start = time.process_time()
    page = render_page(page_data(read_runs(folder)))
    made = time.process_time() - start
    file = folder / "report.html"
    file.write_bytes(page)
    print(f"{what}: {len(page) / 1e6:.2f} MB, made in {made:.1f} s of a core,")
    print(f"  {made / parsed:.1f} times that to parse its records; {first_paint(file)}")


def first_paint(file: Path) -> str:
    """When Chromium shows something, and when everything is drawn."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return "first paint not measured, without Playwright"
    chromium = os.environ.get("FEDCOR_CHROMIUM", "/usr/bin/chromium")
    flags = ["--headless", "--no-sandbox", "--disable-gpu"]
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=flags)
        page = browser.new_page()
        start = time.perf_counter()
        page.goto(file.as_uri())
        page.wait_for_selector("html[data-ready=yes]")
        ready = time.perf_counter() - start
        page.wait_for_timeout(500)
        painted = page.evaluate(PAINT) / 1000
        start = time.perf_counter()
        page.evaluate("Page.step(7)")
        step = time.perf_counter() - start
        browser.close()
    return f"first paint after {painted:.2f} s, drawn after {ready:.2f} s, a step {step:.2f} s"


if __name__ == "__main__":
    main()
