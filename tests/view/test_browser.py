"""The pages in a browser, by `make test-browser`: playwright (not among the extras) with the system's Chromium."""

import shutil
import subprocess
import sys
from contextlib import contextmanager

import pytest
import text_games
import text_runs
from run_folders import write_run

import groupwise as gw
from groupwise import cli
from groupwise.report.folder import RunFolder
from groupwise.report.page import explore, write_page
from groupwise.report.video import film_group
from groupwise.training import build as env_evaluator

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")]


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as engine:
        browser = engine.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser):
    """Opens an address; complains of what the console shows."""
    pages, complaints = [], []

    def opened(address, timeout=30_000, **options):
        page = browser.new_page(**options)
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.set_default_timeout(timeout)
        page.goto(address)
        pages.append(page)
        return page

    yield opened
    for page in pages:
        page.close()
    assert complaints == []


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(env_evaluator, "film_group", film_group)  # of the explorer's frames
        settings = {"evaluation": {"interval": 1_000, "episodes": 3}, "logging": {"progress": "none"}}
        gw.train("CartPole-v1", gw.GRPOCfg(group_size=3), total_steps=2_000, run_dir=folder, **settings)
    write_page(folder)
    return folder


@contextmanager
def process(*args):
    """A command of groupwise, ended in the end."""
    command = [sys.executable, "-m", "groupwise", *map(str, args)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as started:
        try:
            yield started
        finally:
            started.terminate()


def test_the_explorer_is_used_by_keyboard_and_by_links(run, open_page):
    page = open_page((run / "report.html").as_uri())
    explorer = page.locator("#explorer")
    page.locator(".list button").first.click()
    explorer.focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
        page.keyboard.press(key)
    address = page.evaluate("location.hash")
    assert "member=1&step=2" in address
    assert page.locator(".member").nth(1).get_attribute("class") == "member pictured chosen"
    again = open_page((run / "report.html").as_uri() + address)
    assert again.locator(".member.chosen").inner_text() == page.locator(".member.chosen").inner_text()
    page.keyboard.press("PageDown")
    assert page.evaluate("location.hash") != address


def test_a_group_chosen_by_keyboard_is_stepped_through(run, open_page):
    page = open_page((run / "report.html").as_uri())
    page.locator(".list button").nth(1).focus()
    page.keyboard.press("Enter")
    chosen = page.evaluate("location.hash")
    for key in ("ArrowRight", "ArrowDown"):
        page.keyboard.press(key)
    assert page.evaluate("location.hash") == chosen.replace("member=0&step=0", "member=1&step=1")
    page.keyboard.press("PageDown")
    assert page.evaluate("document.activeElement.getAttribute('aria-current')") == "true"


def test_a_notebook_shows_the_page_in_a_frame(run, open_page, tmp_path):
    (tmp_path / "notebook.html").write_text(f"<!DOCTYPE html>{explore(RunFolder(run))._repr_html_()}")
    page = open_page((tmp_path / "notebook.html").as_uri())
    frame = page.frames[1]
    frame.locator("#explorer").focus()
    page.keyboard.press("ArrowDown")
    assert "member=1" in frame.evaluate("location.hash")
    frame.evaluate("scrollTo(0, 0)")
    frame.get_by_role("link", name="Settings").click()
    frame.wait_for_function("scrollY > 0")
    assert frame.locator("h1").count() == 1


def test_it_opens_on_the_group_with_the_largest_spread_whose_frames_follow_the_step(run, open_page):
    page = open_page((run / "report.html").as_uri())
    assert page.locator(".list button").first.get_attribute("aria-current") == "true"
    assert "with frames" in page.locator(".list button").first.inner_text()
    spreads = [float(text.split("spread ")[1].split(",")[0]) for text in page.locator(".list button").all_inner_texts()]
    assert spreads[0] == max(spreads) > 0
    frame = page.locator(".frame").first
    before = frame.get_attribute("aria-label"), frame.evaluate("node => node.style.backgroundPosition")
    page.locator("#explorer").focus()
    for _ in range(12):
        page.keyboard.press("ArrowRight")
    after = frame.get_attribute("aria-label"), frame.evaluate("node => node.style.backgroundPosition")
    assert before[0] != after[0]
    assert before[1] != after[1]
    assert frame.evaluate("node => node.clientWidth") == 150  # a quarter of CartPole's 600


def test_filters_leave_what_they_name(run, open_page):
    page = open_page((run / "report.html").as_uri())
    every = page.locator(".list button").count()
    page.locator("select").first.select_option(index=1)
    assert 0 < page.locator(".list button").count() < every
    page.locator("select").first.select_option("all")
    assert page.locator(".list button").count() == every
    counts = []
    for differ, members in (("some", "differ"), ("zero", "are equal")):
        page.get_by_label("Show").select_option(label=f"members that {members}")
        shown = page.locator(".list button").all_inner_texts()
        assert all(text.endswith("spread 0") == (differ == "zero") for text in shown)
        counts.append(len(shown))
    assert sum(counts) == every
    page.get_by_label("Show").select_option("all")
    for lowest, number in (("100000", 0), ("", every)):
        page.get_by_label("Return from").fill(lowest)
        page.get_by_label("Return from").press("Enter")
        playwright.expect(page.locator(".list button")).to_have_count(number)


@pytest.fixture(scope="module")
def addresses(run, tmp_path_factory):
    """Of a page of each kind."""
    folder = tmp_path_factory.mktemp("pages")
    texts = text_runs.train(text_runs.copying(), text_runs.save_model(folder / "model"), folder / "texts").report()
    episodes = text_runs.train(
        gw.TextTask(env=text_games.Guess, max_turns=3, eval_size=2), folder / "model", folder / "episodes",
        sampling={"max_new_tokens": 2, "stop": tuple(text_runs.DIGITS)},
    ).report()  # fmt: skip
    comparison, again = folder / "comparison.html", shutil.copytree(run, folder / "again")
    assert cli.main(["compare", f"one={run}", f"other={again}", "--out", str(folder)]) == 0
    failed = write_run(folder / "failed", summary={"stopped": "failed", "error": "RuntimeError: broken"})
    files = {
        "control": run / "report.html",
        "texts": texts,
        "episodes": episodes,
        "failed": write_page(failed),
        "comparison": comparison,
    }
    with process("view", run.parent) as viewer:
        yield {name: file.as_uri() for name, file in files.items()} | {"list": viewer.stdout.readline().strip()}


def test_tokens_are_shaded_by_what_is_chosen(addresses, open_page):
    page = open_page(addresses["texts"])
    shades = set()
    for name in ("advantage", "ratio", "log-probability"):
        page.get_by_label("Shade by").select_option(label=name)
        shades.add(page.evaluate("[...document.querySelectorAll('.tokens span')].map(s => s.style.background).join()"))
    assert len(shades) == 3
    page.locator("#explorer").focus()
    page.keyboard.press("ArrowRight")
    assert "step=1" in page.evaluate("location.hash")


def test_a_conversation_is_stepped_through_by_its_own_tokens(addresses, open_page):
    page = open_page(addresses["episodes"])
    member = page.locator(".talk.chosen")
    page.locator("#explorer").focus()
    turns, tokens = member.locator(".turn"), member.locator(".said span")
    assert turns.count() >= 2
    for _ in range(tokens.count() + 1):  # the last key has no effect
        page.keyboard.press("ArrowRight")
    assert tokens.last.get_attribute("class").split()[-1] == "chosen"
    address = page.evaluate("location.hash")
    again = open_page(addresses["episodes"] + address)
    assert again.locator(".said .chosen").evaluate("node => node.offsetLeft") == page.locator(".said .chosen").evaluate(
        "node => node.offsetLeft"
    )
    assert again.evaluate("location.hash") == address
    assert page.locator(".turn").first.inner_text().startswith("Turn 1: reward -0.1, advantage ")
    assert member.locator(".told").first.inner_text().startswith("environment: ")
    # turns of members in one row are at one height
    tops = page.evaluate(
        "[...document.querySelectorAll('.talk')].slice(0, 2).map(b => b.querySelectorAll('.turn')[1]?.getBoundingClientRect().top)"
    )
    assert len({*tops}) == 1


PAGES = ["control", "texts", "episodes", "failed", "comparison", "list"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_a_narrow_screen_is_enough(addresses, open_page, name, scheme):
    page = open_page(addresses[name], viewport={"width": 375, "height": 700}, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= 375
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(255, 255, 255)") == (scheme == "light")
    if name == "list":  # no column is out of sight
        table = page.locator(".runs")
        assert table.evaluate("node => node.scrollWidth <= node.clientWidth")


def test_what_is_chosen_in_the_list_is_drawn_at_once(addresses, open_page):
    page = open_page(addresses["list"])
    runs, label = page.locator(".runs tbody tr"), page.locator(".overlay").first
    every = runs.count()
    page.get_by_label("Metrics").fill("train/entropy")
    playwright.expect(label).to_contain_text("train/entropy")
    page.get_by_label("Runs named").press_sequentially("again")
    playwright.expect(runs).to_have_count(1)
    assert page.evaluate("document.activeElement.name") == "match"  # the reader goes on to write
    assert "metric=train%2Fentropy" in page.url
    page.reload()
    playwright.expect(runs).to_have_count(1)
    playwright.expect(label).to_contain_text("train/entropy")
    page.get_by_label("Runs named").fill("")
    playwright.expect(runs).to_have_count(every)


def test_paper_is_white_and_wide_enough(run, open_page):
    page = open_page((run / "report.html").as_uri(), viewport={"width": 700, "height": 900}, color_scheme="dark")
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    page.locator(".filters").wait_for(state="hidden")
    assert page.locator(".detail").evaluate("node => node.scrollWidth <= node.clientWidth")


@pytest.mark.parametrize("width", [375, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_axe_finds_nothing(addresses, browser, name, scheme, width):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 700}, bypass_csp=True)
    page = context.new_page()
    page.goto(addresses[name])
    page.locator("h1").wait_for()
    found = axe.Axe().run(page)
    context.close()
    assert found.violations_count == 0, found.generate_report()


def test_the_viewer_follows_a_run_that_trains(tmp_path, open_page):
    words = "train CartPole-v1 --total-steps 200000 --speed off --logging.progress none --evaluation.interval 2000"
    words = [*words.split(), "--evaluation.episodes", 2, "--run-dir", tmp_path / "live"]
    with process("view", tmp_path) as viewer, process(*words):
        address = viewer.stdout.readline().strip()
        page = open_page(address, timeout=120_000)  # beside a training, on a machine that may be busy
        page.get_by_role("cell", name="training", exact=True).wait_for()
        page.get_by_role("link", name="live").click()
        state = page.locator("#state")
        state.wait_for()
        before = state.inner_text()
        playwright.expect(state).not_to_have_text(before, timeout=120_000)
        page.locator(".list button").first.wait_for()  # the first groups bring the explorer
        follows = "This page follows the files."
        playwright.expect(page.locator("#link")).to_have_text(follows, timeout=120_000)
        page.close()  # before the server, whose end the console would show
