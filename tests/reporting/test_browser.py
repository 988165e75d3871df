"""The page in a real browser: Chromium, through Playwright. `make test-browser` runs it."""

from __future__ import annotations

import itertools
import json
import os
import threading
from pathlib import Path

import pytest
from page_runs import add_round, write_run

from fedcor.reporting.page import render_page
from fedcor.reporting.page.data import page_data
from fedcor.reporting.page.watch import Follower, PageServer
from fedcor.runs.record import read_runs

playwright = pytest.importorskip("playwright.sync_api", reason="make test-browser installs it")

pytestmark = pytest.mark.browser
CHROMIUM = os.environ.get("FEDCOR_CHROMIUM", "/usr/bin/chromium")
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
]  # fmt: skip
EVIL = '<script>document.title = "hacked"</script><img src=x onerror="document.title=1">'
WIDTHS = (360, 1440)
# Whether anything is drawn on a canvas: not all its pixels are the same.
PAINTED = """canvas => {
    const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    const words = new Uint32Array(pixels.buffer), seen = new Set();
    for (let i = 0; i < words.length; i += 7) seen.add(words[i]);
    return seen.size;
}"""


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for seed in (1, 2, 3):
        for selector in ("random", "afl", "fedcor"):
            write_run(folder, selector, seed, rounds=40, clients=30, names={2: EVIL})
    return folder


@pytest.fixture(scope="module")
def file(folder) -> Path:
    path = folder / "report.html"
    path.write_bytes(render_page(page_data(read_runs(folder))))
    return path


@pytest.fixture
def open_page(browser):
    """Opens an address in a window of its own; no message of the console may be an error."""
    contexts, problems = [], []

    def open_page(address, width=1440, scheme="light"):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.on("console", lambda said: problems.append(said.text) if said.type == "error" else 0)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on(
            "request",
            lambda asked: (
                problems.append(asked.url)
                if not asked.url.startswith(("file:", "http://127.0.0.1:"))
                else None
            ),
        )
        page.goto(address)
        page.wait_for_selector("html[data-ready=yes]")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert problems == []


@pytest.mark.parametrize("width", WIDTHS)
def test_every_chart_is_drawn(open_page, file, width):
    page = open_page(file.as_uri(), width)
    assert page.locator("#verdict-text").inner_text()
    for canvas in ("#curve-chart canvas", "#heat canvas"):
        assert page.locator(canvas).evaluate(PAINTED) > 4, canvas
    assert page.locator("#map circle").count() == 30
    assert page.locator("#map circle.chosen").count() == 4
    assert page.locator("#losses rect").count() >= 5
    assert page.locator("#health-body svg").count() == 4
    assert page.locator("#health-body polyline").count() == 6
    assert page.locator("#table tbody tr").count() == 3
    across = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert across[0] <= across[1]  # nothing sticks out


def test_a_window_without_room_is_no_error(open_page, file):
    """The fixture finds what the console says of a chart without a width."""
    page = open_page(file.as_uri())
    page.evaluate("document.body.style.display = 'none'; window.dispatchEvent(new Event('resize'))")
    page.wait_for_timeout(200)
    page.evaluate("document.body.style.display = ''; window.dispatchEvent(new Event('resize'))")
    page.wait_for_timeout(200)
    assert page.locator("#map circle").count() == 30


def test_text_of_records_is_only_text(open_page, file):
    page = open_page(file.as_uri())
    assert page.title() == "toy · fedcor report"
    assert page.locator("main img").count() == 0
    shown = page.evaluate("Page.running.clients.names[2]")
    assert shown == EVIL
    # Chosen in some round, the client stands in the table, as text.
    rounds = page.evaluate("Page.running.attendance.selected.findIndex(list => list.includes(2))")
    page.evaluate("round => Page.step(round)", rounds)
    assert EVIL in page.locator("#why-table").inner_text()
    assert page.title() == "toy · fedcor report"


def test_no_other_script_can_run(open_page, file, tmp_path):
    """The policy holds: a script that someone puts into the file does nothing."""
    text = file.read_text(encoding="utf-8")
    changed = tmp_path / "changed.html"
    added = '<script>document.title = "hacked"</script></body>'
    changed.write_text(text.replace("</body>", added), encoding="utf-8")
    context = open_page(file.as_uri()).context.browser.new_context()
    page = context.new_page()
    page.goto(changed.as_uri())
    page.wait_for_selector("html[data-ready=yes]")
    assert page.title() == "toy · fedcor report"
    context.close()


def test_slider_buttons_and_keys_change_the_explanation(open_page, file):
    page = open_page(file.as_uri())
    table, text = page.locator("#why-table"), page.locator("#round-text")
    assert text.inner_text() == "round 39 of 39"
    last = table.inner_text()
    page.locator("#round").focus()
    page.keyboard.press("ArrowLeft")
    assert text.inner_text() == "round 38 of 39"
    assert table.inner_text() != last
    page.keyboard.press("Home")
    assert text.inner_text() == "round 0 of 39"
    page.get_by_label("Next round").click()
    assert text.inner_text() == "round 1 of 39"
    page.locator("#heat canvas").focus()
    page.keyboard.press("End")
    assert text.inner_text() == "round 39 of 39"
    assert table.inner_text() == last
    page.keyboard.press("ArrowLeft")  # the focus stays on the heat map
    assert text.inner_text() == "round 38 of 39"


def test_each_pick_is_what_the_record_says(open_page, file, folder):
    page = open_page(file.as_uri())
    run = next(run for run in read_runs(folder) if run.path.match("fedcor/seed-1"))
    page.evaluate("Page.step(20)")
    rows = page.locator("#why-table tbody th").all_inner_texts()
    assert [int(text.split(" ")[0]) for text in rows] == run.rounds[20]["selected"]
    ringed = page.locator("#map circle.chosen").evaluate_all(
        "found => found.map(one => Number(one.dataset.client))"
    )
    assert sorted(ringed) == sorted(run.rounds[20]["selected"])


def test_another_run_can_be_chosen(open_page, file):
    page = open_page(file.as_uri())
    page.locator("#stepper select").select_option(label="random, seed 2")
    assert "random chose" in page.locator("#why-text").inner_text()
    assert "learns no map" in page.locator("#map").inner_text()
    assert "learns no Gaussian process" in page.locator("#health-body").inner_text()


def test_it_opens_with_the_best_selector_that_gives_reasons(open_page, folder, file, tmp_path):
    page = open_page(file.as_uri())
    order = page.evaluate("Page.now.series.map(series => series.short)")
    assert order[0] == "fedcor"
    shown = page.locator("#why-run").inner_text()
    assert shown == "Shown: fedcor, seed 1, a run of the best selector in the table."
    data = page_data(read_runs(folder))
    for run in data["experiments"][0]["runs"]:
        run["why"]["reasons"] = {"luck": "made up"} if run["series"] == 2 else {}
    path = tmp_path / "page.html"
    path.write_bytes(render_page(data))
    page = open_page(path.as_uri())
    assert page.locator("#why-run").inner_text() == (
        f"Shown: {order[2]}, seed 1, the best selector whose record has reasons; that of fedcor "
        "has none."
    )
    # The health is that of the selector that learns a process.
    assert "learns no Gaussian process, so this is a run of fedcor" in (
        page.locator("#health-body").inner_text()
    )
    assert page.locator("#health-body svg").count() == 4
    page.locator("#stepper select").select_option(label="fedcor, seed 2")
    assert page.locator("#why-run").inner_text() == ""
    assert "In fedcor, seed 2, before" in page.locator("#health-body").inner_text()


def test_a_lead_is_also_shown_in_percent_of_the_gain(open_page, folder, tmp_path):
    data = page_data(read_runs(folder))
    run = next(run for run in data["experiments"][0]["runs"] if run["health"] and run["seed"] == 1)
    last = run["why"]["rounds"][-1]
    last["reasons"]["gain"], last["by"] = [0.2, 0.2, 0.2, -0.1], [0.1, 0.012, 0.0096, 0.3]
    path = tmp_path / "page.html"
    path.write_bytes(render_page(data))
    page = open_page(path.as_uri())
    cells = page.locator("#why-table tbody td:last-child").all_inner_texts()
    assert [" ".join(cell.split()) for cell in cells] == [
        "0.1 50 %", "0.012 6 %", "0.0096 4.8 %, a near-tie", "0.3",
    ]  # fmt: skip
    head = page.locator("#why-table thead th").all_inner_texts()
    assert {"annealing\u00a0×", "predicted change of its own loss"} <= {*head}
    assert "The largest gain is picked." in page.locator("#why-text").inner_text()


def test_equally_frequent_labels_share_a_dot(open_page, folder, tmp_path):
    data = page_data(read_runs(folder))
    for run in data["experiments"][0]["runs"]:
        run["clients"]["labels"] = [[1, 5, 5, 0]] * 10 + [[1, 5, 4, 0]] * 10 + [[5, 5, 5, 5]] * 10
    path = tmp_path / "page.html"
    path.write_bytes(render_page(data))
    page = open_page(path.as_uri())
    assert page.locator("#map path").count() == 20  # two halves each
    hues = page.locator("#map path").evaluate_all("all => all.map(one => one.getAttribute('fill'))")
    assert len({*hues}) == 2
    fills = page.locator("#map circle").evaluate_all(
        "all => all.map(one => one.getAttribute('fill'))"
    )
    assert sorted(fills.count(fill) for fill in {*fills}) == [10, 10, 10]
    key = page.locator("#map .key").inner_text()
    assert all(text in key for text in ("label 0", "label 3", "many, equally"))
    assert page.locator("#map circle").count() == 30
    page.evaluate("Page.step(20)")
    chosen = page.evaluate("Page.running.attendance.selected[20]")
    shown = page.locator("#map text.number").all_text_contents()
    assert sorted(map(int, shown)) == sorted(chosen)


def test_small_charts_have_rounds_and_a_zero_line(open_page, file):
    page = open_page(file.as_uri())
    score = page.locator("#health-body svg").first
    ticks = [int(text) for text in score.locator("text.tick").all_text_contents()]
    assert len(ticks) >= 4
    assert len({b - a for a, b in itertools.pairwise(ticks)}) == 1
    low, high = page.evaluate(
        "(h => { const v = [...h.log_score, ...h.each].filter(x => x !== null);"
        "return [Math.min(...v), Math.max(...v)]; })(Page.running.health)"
    )
    assert low < 0 < high
    assert score.locator("line.zero").count() == 1


def test_in_a_narrow_window_the_difference_comes_first_and_all_sections_are_named(open_page, file):
    page = open_page(file.as_uri(), 400)
    head = page.locator("#table thead th").all_inner_texts()
    assert "minus random" in head[1].replace("\n", " ")
    page.locator("#table thead button").nth(1).click()  # the focus stays on the button
    assert page.locator("#table thead th").nth(1).get_attribute("aria-sort") == "descending"
    assert page.evaluate("document.activeElement.textContent").startswith("mean accuracy minus")
    for link in page.locator("nav a").all():
        box = link.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 400
    page.set_viewport_size({"width": 1200, "height": 900})
    playwright.expect(page.locator("#table thead th").last).to_contain_text("minus random")


def test_the_table_says_what_the_curves_do_not(open_page, file):
    page = open_page(file.as_uri())
    text = page.locator("#table-hint").inner_text().replace("\u00a0", " ")
    assert "First round at 50 %" in text
    assert "The curves show 2-round means" in text


def test_hovering_shows_values(open_page, file):
    page = open_page(file.as_uri())
    tip = page.locator("#curve-chart .tip")
    assert tip.is_hidden()
    page.locator("#curve-chart .u-over").hover()
    assert "%" in tip.inner_text()
    assert tip.inner_text().count("(") == 3  # the lowest and the highest seed of each
    page.locator("#heat canvas").hover()
    assert page.locator("#heat .tip").inner_text().startswith("client ")
    page.locator("#map circle.chosen").first.hover()
    assert "times chosen" in page.locator("#map .tip").inner_text()


def test_keys_read_the_curves(open_page, file):
    page = open_page(file.as_uri())
    page.locator("#curve-chart .uplot").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("#curve-chart .tip:not([hidden])")
    assert page.locator("#curve-chart .tip b").inner_text() == "round 1"


def test_curves_zoom_and_change(open_page, file):
    page = open_page(file.as_uri())
    canvas = page.locator("#curve-chart canvas")
    before = canvas.evaluate("canvas => canvas.toDataURL()")
    seen = {before}
    for label in ("Loss", "bytes", "time"):
        page.locator("#curve-controls").get_by_label(label, exact=True).check(force=True)
        seen.add(canvas.evaluate("canvas => canvas.toDataURL()"))
    page.get_by_label("log scale").check()
    seen.add(canvas.evaluate("canvas => canvas.toDataURL()"))
    page.locator("#legend button").first.click()
    seen.add(canvas.evaluate("canvas => canvas.toDataURL()"))
    assert len(seen) == 6
    assert page.locator("#legend button").first.get_attribute("aria-pressed") == "false"
    box = page.locator("#curve-chart .u-over").bounding_box()
    page.mouse.move(box["x"] + 100, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + 300, box["y"] + 60, steps=4)
    page.mouse.up()
    page.locator("#zoom-out").click()
    assert page.locator("#zoom-out").is_hidden()


def test_the_table_sorts(open_page, file):
    page = open_page(file.as_uri())
    names = page.locator("#table tbody th")
    head = page.locator("#table thead th").first
    page.locator("#table thead button").first.click()
    assert head.get_attribute("aria-sort") == "ascending"
    assert names.all_inner_texts() == ["afl", "fedcor", "random"]
    page.keyboard.press("Enter")  # the focus stays on the button
    assert head.get_attribute("aria-sort") == "descending"
    assert names.all_inner_texts() == ["random", "fedcor", "afl"]


def test_several_experiments_are_shown_one_at_a_time(open_page, tmp_path):
    write_run(tmp_path / "a", "fedcor", rounds=6)
    write_run(tmp_path / "b", "random", rounds=4, experiment="other")
    path = tmp_path / "page.html"
    path.write_bytes(render_page(page_data(read_runs(tmp_path))))
    page = open_page(path.as_uri())
    assert page.locator("#verdict-title").inner_text().startswith("toy")
    page.locator("#experiment-picker select").select_option(label="other")
    assert page.locator("#verdict-title").inner_text().startswith("other")
    assert page.locator("#round-text").inner_text() == "round 3 of 3"
    assert page.locator("#health").is_hidden()
    page.locator("#experiment-picker select").select_option(label="toy")
    assert page.locator("#round-text").inner_text() == "round 5 of 5"


def test_flower_s_numbers_and_faults_are_shown(open_page, tmp_path):
    write_run(tmp_path, "fedcor", flower=True, names={1: "north"})
    path = tmp_path / "page.html"
    path.write_bytes(render_page(page_data(read_runs(tmp_path))))
    page = open_page(path.as_uri())
    assert page.locator("#round-text").inner_text() == "round 12 of 12"
    page.evaluate("Page.step(10)")
    assert "1 did not deliver" in page.locator("#why-text").inner_text()
    assert page.locator("#why-table .pill").count() == 1
    assert "left alone" in page.locator("#heat").inner_text()
    canvas = page.locator("#heat canvas")
    box = canvas.bounding_box()
    at = 46 + (box["width"] - 52) * 10.5 / 12
    canvas.hover(position={"x": at, "y": 20})
    assert "faults: 1 late" in page.locator("#heat .tip").inner_text()


def test_a_run_without_rounds_has_a_page(open_page, tmp_path):
    write_run(tmp_path, "random", rounds=0, planned=5)
    path = tmp_path / "page.html"
    path.write_bytes(render_page(page_data(read_runs(tmp_path))))
    page = open_page(path.as_uri())
    assert page.locator("#verdict-text").inner_text() == "No round is finished yet."
    assert "No round" in page.locator("#curve-chart").inner_text()


def test_the_command_is_copied(open_page, file, folder, tmp_path):
    data = page_data(read_runs(folder))
    data["experiments"][0]["run_with"]["command"] = "fedcor compare toy"
    path = tmp_path / "page.html"
    path.write_bytes(render_page(data))
    page = open_page(path.as_uri())
    page.get_by_role("button", name="Copy").click()
    playwright.expect(page.locator(".command button")).to_have_text("Copied")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_axe_finds_nothing_serious(open_page, file, width, scheme):
    axe = Path(os.environ.get("FEDCOR_AXE", "")).expanduser()
    if not axe.is_file():
        pytest.skip("make test-browser fetches axe-core and names it in FEDCOR_AXE")
    page = open_page(file.as_uri(), width, scheme)
    page.evaluate(axe.read_text(encoding="utf-8"))  # through the debugger, which no policy stops
    found = page.evaluate("axe.run()")
    serious = [
        (one["id"], one["impact"], [node["html"][:150] for node in one["nodes"][:3]])
        for one in found["violations"]
        if one["impact"] in ("serious", "critical")
    ]
    assert serious == [], json.dumps(serious, indent=1)
    assert len(found["passes"]) > 15


def test_tab_reaches_every_control_in_the_order_of_the_page(open_page, file):
    page = open_page(file.as_uri())
    heights = []
    for _ in range(40):
        page.keyboard.press("Tab")
        place = page.evaluate(
            "(() => { const e = document.activeElement, s = e.closest('section');"
            "return s ? [...document.querySelectorAll('section')].indexOf(s) : -1; })()"
        )
        heights.append(place)
    inside = [place for place in heights if place >= 0]
    assert inside == sorted(inside)
    assert {0, 1, 2, 3} <= set(inside)


def test_a_new_round_appears_without_a_reload(open_page, tmp_path):
    run = write_run(tmp_path, "fedcor", 1, rounds=5, planned=8)
    with PageServer(Follower(tmp_path)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            page = open_page(server.url)
            assert page.locator("#round-text").inner_text() == "round 4 of 4"
            page.evaluate("window.kept = true")
            playwright.expect(page.locator("#status")).to_have_text("following: 5 of 8 rounds")
            page.get_by_label("log scale").check()
            add_round(run)
            playwright.expect(page.locator("#round-text")).to_have_text("round 5 of 5")
            playwright.expect(page.locator("#status")).to_have_text("following: 6 of 8 rounds")
            page.locator("#round").focus()
            page.keyboard.press("Home")
            add_round(run)
            playwright.expect(page.locator("#round-text")).to_have_text("round 0 of 6")
            # The round that one looks at, the focus and the settings stay.
            assert page.evaluate("document.activeElement.id") == "round"
            assert page.get_by_label("log scale").is_checked()
            assert page.evaluate("window.kept")
        finally:
            page.goto("about:blank")  # ends its question
            server.shutdown()
            thread.join()
