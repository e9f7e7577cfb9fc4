"""The report in a real browser: it renders on a phone and a wide screen, its script runs, and it makes no requests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser, Page, find_browser

from safetrain.report import write_report

pytestmark = pytest.mark.skipif(find_browser() is None, reason="no Chromium here: apt-get install chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser.start() as started:
        yield started


@pytest.fixture(scope="module")
def page_of(faulty_run: Path, healthy_run: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("pages")
    return {
        "report": write_report(faulty_run, directory / "report.html").path,
        "comparison": write_report(faulty_run, directory / "comparison.html", healthy_run).path,
    }


def is_visible(page: Page, selector: str) -> bool:
    """The element exists and takes up space."""
    found = f"document.querySelector({selector!r})"
    return bool(page.run(f"!!{found} && {found}.getBoundingClientRect().height > 8"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1600])
@pytest.mark.parametrize("kind", ["report", "comparison"])
def test_it_renders_at_every_width(
    browser: Browser, page_of: dict[str, Path], kind: str, width: int, scheme: str
) -> None:
    page = browser.open(page_of[kind], width, scheme)
    assert page.problems == []
    assert page.requests == []
    assert page.run("document.documentElement.scrollWidth") == width  # no horizontal scrolling
    number = "a1" if kind == "comparison" else "1"
    for selector in (".verdict", "#timeline", "#incidents table", f"#incident-{number} .source .blamed", f"#incident-{number} .fix",
                     f"#incident-{number} .plots svg", f"#incident-{number} .way", "#details"):  # fmt: skip
        assert is_visible(page, selector), selector
    assert is_visible(page, ".plot.wide svg") == (width == 1600)
    assert is_visible(page, ".plot.narrow svg") == (width == 400)
    # Text in the plots is large enough to read and not cut off.
    shown = ".plot.narrow" if width == 400 else ".plot.wide"
    smallest, left = page.run(
        f"(() => {{ const boxes = [...document.querySelectorAll('{shown} text')].map(t => t.getBoundingClientRect());"
        " return [Math.min(...boxes.map(b => b.height)), Math.min(...boxes.map(b => b.left))]; })()"
    )
    assert smallest > 9
    assert left >= 0
    light = page.run("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).reduce((a, b) => a + +b, 0) > 380")
    assert light == (scheme == "light")


def test_colours_of_the_plots_follow_the_theme(browser: Browser, page_of: dict[str, Path]) -> None:
    page = browser.open(page_of["report"], 1600, "light")
    colour = "getComputedStyle(document.querySelector('.plot.wide svg text')).fill"
    light = page.run(colour)
    page.run("document.getElementById('theme').click()")
    assert page.run("document.documentElement.dataset.theme") == "dark"
    assert page.run(colour) != light
    page.run("document.getElementById('theme').click()")
    assert page.run(colour) == light
    assert page.problems == []


def test_links_lead_to_incidents_and_commands_can_be_copied(browser: Browser, page_of: dict[str, Path]) -> None:
    page = browser.open(page_of["report"], 1600)
    page.run(
        "document.querySelector('.plot.wide a[*|href=\"#incident-2\"]').dispatchEvent(new MouseEvent('click', {bubbles: true}))"
    )
    assert page.run("location.hash") == "#incident-2"
    assert page.run("document.querySelector('#incident-2:target') !== null")
    page.run("document.querySelector('#incidents a[href=\"#incident-3\"]').click()")
    assert page.run("location.hash") == "#incident-3"
    page.run(
        "window.kept = ''; document.execCommand = () => { window.kept = getSelection().toString(); return true; };"
    )
    page.run(
        "Object.defineProperty(navigator, 'clipboard', {value: {writeText: async text => { window.kept = text; }}})"
    )
    page.run("document.querySelector('#incident-1 .fix .copy').click()")
    assert page.run("window.kept").endswith("per_sensor = safe.div((error * weights).sum(1), weights.sum(1))")
    assert page.run("document.querySelector('#incident-1 .fix .copy').textContent") == "Copied"
    assert page.problems == []


def test_it_can_be_read_without_its_script(browser: Browser, page_of: dict[str, Path], tmp_path: Path) -> None:
    text = page_of["report"].read_text(encoding="utf-8")
    bare = tmp_path / "bare.html"
    bare.write_text(text[: text.index("<script>")] + text[text.index("</script>") :], encoding="utf-8")
    page = browser.open(bare, 400)
    assert is_visible(page, "#incident-1 .fix")
    assert not is_visible(page, "#theme")
