"""Debian's Chromium, driven by Selenium, so that tests see a page as a person does."""

from __future__ import annotations

import base64
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By

from tests.faults import wait_until

WIDE, PHONE = (1280, 900), (390, 844)

_CONTRAST = """
const parts = (css) => {
  const found = (css.match(/[\\d.]+/g) || [0, 0, 0]).map(Number);
  // What is mixed is told in shares of one: color(srgb 0.9 0.8 0.8 / 0.1).
  const most = css.startsWith("color(") ? 255 : 1;
  return found.map((part, index) => (index < 3 ? part * most : part));
};
const over = (top, below) => {
  const alpha = top.length > 3 ? top[3] : 1;
  return [0, 1, 2].map((i) => alpha * top[i] + (1 - alpha) * below[i]);
};
const luminance = (rgb) => rgb.reduce((sum, value, i) => {
  const part = value / 255;
  const linear = part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  return sum + [0.2126, 0.7152, 0.0722][i] * linear;
}, 0);
const behind = [];
for (let one = arguments[0]; one; one = one.parentElement) {
  behind.unshift(parts(getComputedStyle(one).backgroundColor));
}
const ground = behind.reduce((below, top) => over(top, below), [255, 255, 255]);
const text = over(parts(getComputedStyle(arguments[0]).color), ground);
const [dark, light] = [luminance(ground), luminance(text)].sort((a, b) => a - b);
return (light + 0.05) / (dark + 0.05);
"""


#: Roles that a screen reader announces by a name.
_NAMED = {
    *("button", "link", "textbox", "searchbox", "combobox", "checkbox", "radio"),
    *("image", "img", "SvgRoot", "graphics-document", "spinbutton", "progressbar"),
}


def missing() -> str:
    """Return what must be installed to drive a browser; "" if nothing is missing."""
    if _program("chromium") and _program("chromedriver"):
        return ""
    return "no browser: apt-get install chromium chromium-driver"


def _program(name: str) -> str | None:
    return shutil.which(name)


class Browser:
    """A headless browser that records errors on its console."""

    def __init__(self, driver: Any, base: str) -> None:
        self.driver, self._base = driver, base

    def open(self, path: str) -> None:
        """Go to a path of the site."""
        self.driver.get(self._base + path)

    def look(self, *, dark: bool = False, size: tuple[int, int] = WIDE) -> None:
        """Set the window's size, and the light or dark mode."""
        command = self.driver.execute_cdp_cmd
        scheme = "dark" if dark else "light"
        command(
            "Emulation.setEmulatedMedia",
            {"features": [{"name": "prefers-color-scheme", "value": scheme}]},
        )
        width, height = size
        command(
            "Emulation.setDeviceMetricsOverride",
            {
                "width": width,
                "height": height,
                "deviceScaleFactor": 1,
                "mobile": size == PHONE,
            },
        )

    def find(self, css: str) -> Any:
        """Return the first element that matches, and wait until there is one."""
        return wait_until(
            lambda: next(iter(self.driver.find_elements(By.CSS_SELECTOR, css)), None),
            message=f"an element {css} at {self.driver.current_url}",
        )

    def unreadable(self) -> list[str]:
        """Return what a screen reader cannot announce: controls and drawings without a
        name, tables without headers, and headings that skip a level."""
        tree = self.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
        nodes = {one["nodeId"]: one for one in tree}

        def within(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
            """Yield a node and the nodes in it, in the order of the page."""
            yield node
            for child in node.get("childIds", ()):
                if child in nodes:
                    yield from within(nodes[child])

        def role(node: dict[str, Any]) -> str:
            return "" if node["ignored"] else str(node["role"]["value"])

        found, level = [], 0
        for node in within(tree[0]):
            name = node.get("name", {}).get("value", "").strip()
            if role(node) in _NAMED and not name:
                found.append(f"{role(node)} without a name")
            if role(node) == "table" and "columnheader" not in map(role, within(node)):
                found.append(f"table {name!r} without headers")
            if role(node) == "heading":
                about = {one["name"]: one["value"] for one in node["properties"]}
                depth = about["level"]["value"]
                if depth > level + 1:
                    found.append(f"heading {name!r}: level {depth} after {level}")
                level = depth
        return found

    def click(self, text: str) -> None:
        """Click the link or button with this text."""
        quoted = f'"{text}"'
        path = f"//a[contains(., {quoted})] | //button[contains(., {quoted})]"

        def pressed() -> bool:
            try:
                for found in self.driver.find_elements(By.XPATH, path):
                    if found.is_displayed() and found.is_enabled():
                        # Above the fold or not: a person scrolls first.
                        self.driver.execute_script(
                            "arguments[0].scrollIntoView({block: 'center'})", found
                        )
                        found.click()
                        return True
            except StaleElementReferenceException:
                pass  # the page has just renewed it
            return False

        wait_until(
            pressed,
            message=lambda: f"a link or button {text!r} at {self.driver.current_url}",
        )

    @property
    def text(self) -> str:
        """Return all visible text."""
        shown: str = self.driver.execute_script("return document.body.innerText")
        return shown

    def until(self, text: str, *, deadline: float = 30.0) -> None:
        """Wait until the page shows this text."""
        wait_until(
            lambda: text in self.text,
            deadline=deadline,
            message=lambda: (
                f"{text!r} on {self.driver.current_url}: {self.text[:2000]}"
            ),
        )

    def errors(self) -> list[str]:
        """Return the errors on the console, except the missing favicon."""
        return [
            entry["message"]
            for entry in self.driver.get_log("browser")
            if entry["level"] == "SEVERE" and "favicon.ico" not in entry["message"]
        ]

    def overflows(self) -> bool:
        """Return whether the page as a whole scrolls sideways."""
        wide: bool = self.driver.execute_script(
            "return document.documentElement.scrollWidth > window.innerWidth + 1"
        )
        return wide

    def torn(self, css: str) -> list[str]:
        """Return the texts of the elements that are broken over several lines."""
        found: list[str] = self.driver.execute_script(
            "return [...document.querySelectorAll(arguments[0])]"
            ".filter((one) => one.getClientRects().length > 1)"
            ".map((one) => one.innerText)",
            css,
        )
        return found

    def contrast(self, element: Any) -> float:
        """Return the contrast of an element's text with its background, by the
        definition of WCAG: 1 is invisible, 4.5 is enough."""
        ratio: float = self.driver.execute_script(_CONTRAST, element)
        return ratio

    def photograph(self, directory: Path, name: str) -> None:
        """Save a screenshot of the whole page, small enough for the docs."""
        width, height = self.driver.execute_script(
            "return [window.innerWidth,"
            " Math.min(document.documentElement.scrollHeight, 1500)]"
        )
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 0.75}
        taken = self.driver.execute_cdp_cmd(
            "Page.captureScreenshot", {"clip": clip, "captureBeyondViewport": True}
        )
        (directory / f"{name}.png").write_bytes(base64.b64decode(taken["data"]))


@contextmanager
def browser(base: str) -> Iterator[Browser]:
    """Start Chromium, and stop it at the end."""
    options = webdriver.ChromeOptions()
    options.binary_location = _program("chromium") or ""
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(
        options=options,
        service=Service(_program("chromedriver"), log_output=os.devnull),
    )
    try:
        yield Browser(driver, base)
    finally:
        driver.quit()
