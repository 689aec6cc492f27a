"""The page in a real browser: no errors, everything rendered, sortable, two themes, a phone."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fake_results
from holdfast import report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        not (CHROMIUM and DRIVER),
        reason="needs Chromium and chromedriver on the PATH (Debian: chromium, chromium-driver)",
    ),
]

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-quic",
)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = fake_results.folder(tmp_path_factory.mktemp("toy"), seeds=2, epochs=3)
    return report.write(folder).as_uri()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


def _open(browser: Any, page: str, width: int = 1280, dark: bool = False) -> None:
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500},
    )
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    browser.get(page)


def test_it_opens_without_errors_and_fetches_nothing(browser: Any, page: str) -> None:
    _open(browser, page)
    assert browser.get_log("browser") == []
    fetched = browser.execute_script(
        "return performance.getEntriesByType('resource').map(e => e.name)"
        ".filter(name => !name.startsWith('data:'))"
    )
    assert fetched == []


def test_every_figure_has_rendered(browser: Any, page: str) -> None:
    _open(browser, page)
    sizes = browser.execute_script(
        """
        return [...document.querySelectorAll("figure svg")].map(svg => {
          const box = svg.getBoundingClientRect(), drawn = svg.getBBox();
          return [box.width, box.height, drawn.width, drawn.height];
        })"""
    )
    assert len(sizes) == 25  # 3 presets × (accuracy, curves, boundaries) × 2, and 7 more
    assert all(min(size) > 50 for size in sizes)
    inner = browser.execute_async_script(
        """
        const done = arguments[arguments.length - 1];
        const sources = [...document.querySelectorAll("svg image")].map(i => i.href.baseVal);
        const images = [...document.images].map(i => i.src);
        Promise.all([...sources, ...images].map(source => new Promise(resolve => {
          const image = new Image();
          image.onload = () => resolve(image.naturalWidth);
          image.onerror = () => resolve(0);
          image.src = source;
        }))).then(done)"""
    )
    assert len(inner) >= 8  # two heat maps, six pictures of boundaries
    assert min(inner) > 0


def _show(browser: Any, element: Any) -> None:
    """Scroll at once: the page itself glides, and a click does not wait for it."""
    browser.execute_script(
        "arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", element
    )


def _column(browser: Any, table: str, index: int) -> list[str]:
    return browser.execute_script(
        "return [...document.querySelectorAll(arguments[0] + ' tbody tr')]"
        ".map(row => row.cells[arguments[1]].textContent)",
        f"#table-{table}",
        index,
    )


def _numbers(texts: list[str]) -> list[float]:
    return [float(text.split(" ")[0].replace("−", "-")) for text in texts]


def test_tables_sort_by_click_and_by_key(browser: Any, page: str) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    _open(browser, page)
    head = browser.find_elements(By.CSS_SELECTOR, "#table-accuracy-paper thead th")[2]
    button = head.find_element(By.TAG_NAME, "button")
    _show(browser, button)
    before = _numbers(_column(browser, "accuracy-paper", 2))
    button.click()
    assert head.get_attribute("aria-sort") == "ascending"
    assert _numbers(_column(browser, "accuracy-paper", 2)) == sorted(before)
    button.send_keys(Keys.ENTER)
    assert head.get_attribute("aria-sort") == "descending"
    assert _numbers(_column(browser, "accuracy-paper", 2)) == sorted(before, reverse=True)
    others = browser.find_elements(By.CSS_SELECTOR, '#table-accuracy-paper th[aria-sort="none"]')
    assert (
        len(others)
        == len(browser.find_elements(By.CSS_SELECTOR, "#table-accuracy-paper thead th")) - 1
    )


def test_missing_values_sort_last_in_both_directions(browser: Any, page: str) -> None:
    from selenium.webdriver.common.by import By

    _open(browser, page)
    button = browser.find_elements(By.CSS_SELECTOR, "#table-beside-original-code thead button")[2]
    _show(browser, button)
    for _ in range(2):
        button.click()
        shown = _column(browser, "beside-original-code", 2)
        known = [text for text in shown if text != "—"]
        assert known
        assert shown == known + ["—"] * (len(shown) - len(known))


def _background(browser: Any) -> str:
    return browser.execute_script("return getComputedStyle(document.body).backgroundColor")


def _ink(browser: Any) -> str:
    return browser.execute_script(
        "return getComputedStyle(document.querySelector('figure svg text')).fill"
    )


@pytest.mark.parametrize("dark", [False, True])
def test_the_theme_follows_the_system_and_the_button(browser: Any, page: str, dark: bool) -> None:
    from selenium.webdriver.common.by import By

    _open(browser, page, dark=dark)
    browser.execute_script("localStorage.clear()")
    browser.refresh()
    first, ink = _background(browser), _ink(browser)
    brightness = sum(int(n) for n in first.removeprefix("rgb(").removesuffix(")").split(","))
    assert (brightness < 200) == dark
    button = browser.find_element(By.ID, "theme")
    button.click()
    assert _background(browser) != first
    assert _ink(browser) != ink  # figures turn with the page
    browser.refresh()
    assert _background(browser) != first  # and the choice is kept
    browser.find_element(By.ID, "theme").click()
    assert _background(browser) == first
    browser.execute_script("localStorage.clear()")


@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_the_page_never_scrolls_sideways(browser: Any, page: str, width: int) -> None:
    _open(browser, page, width)
    wide = browser.execute_script("return document.documentElement.scrollWidth")
    assert wide <= width
    text = browser.execute_script(
        "return parseFloat(getComputedStyle(document.querySelector('td')).fontSize)"
    )
    assert text >= 12


def test_a_partial_folder_opens_without_errors(browser: Any, tmp_path: Path) -> None:
    fake_results.result(fake_results.experiment()).save(tmp_path)
    _open(browser, report.write(tmp_path).as_uri(), 390)
    assert browser.get_log("browser") == []
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
