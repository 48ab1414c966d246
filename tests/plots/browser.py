"""A headless Chromium for the tests, through the WebDriver protocol of chromedriver: HTTP and JSON, no package."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"),
)
KEYS = {"left": "\ue012", "right": "\ue014", "up": "\ue013", "down": "\ue015", "home": "\ue011", "end": "\ue010"} | {
    "page up": "\ue00e", "page down": "\ue00f", "tab": "\ue004", "escape": "\ue00c", "space": " "
}  # fmt: skip
SECONDS = 60  # that the browser may take to start or to answer


def missing() -> str:
    """The things that this machine lacks for the tests of pages, in words; empty where nothing is missing."""
    absent = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"no {' and no '.join(absent)} on this machine; `make browser` installs them" if absent else ""


class Browser:
    """One window. Use as a context manager; what it keeps lies in `folder`."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.port, self.session = 0, ""

    def __enter__(self) -> Browser:
        log = self.folder / "chromedriver.log"
        with log.open("w") as said:
            command = [str(shutil.which("chromedriver")), "--port=0"]
            self.driver = subprocess.Popen(command, stdout=said, stderr=said)
        try:
            self._start(log)
            self.prefer()
        except BaseException:
            self.driver.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._ask("DELETE", "")
        finally:
            self.driver.terminate()
            self.driver.wait(SECONDS)

    def open(self, page: Path | str) -> None:
        """Show a page, a file or an address, and wait until it is drawn."""
        self._ask("POST", "/url", {"url": page if isinstance(page, str) else page.as_uri()})
        self.wait("return document.documentElement.dataset.ready")

    def wait(self, script: str, *arguments: Any) -> Any:
        """The value of a script in the page, once it is true."""
        end = time.monotonic() + SECONDS
        while not (value := self.run(script, *arguments)):
            assert time.monotonic() < end, f"never: {script}\n{self.run('return document.body.innerText')[:500]}"
            time.sleep(0.05)
        return value

    def run(self, script: str, *arguments: Any) -> Any:
        """The value that a script in the page returns."""
        return self._ask("POST", "/execute/sync", {"script": script, "args": arguments})

    def press(self, *keys: str) -> None:
        """Press keys one after another, by their names in `KEYS`."""
        actions = [{"type": kind, "value": KEYS[key]} for key in keys for kind in ("keyDown", "keyUp")]
        self._ask("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def click(self, selector: str) -> None:
        """Click the first element that a selector finds."""
        element = self._ask("POST", "/element", {"using": "css selector", "value": selector})
        self._ask("POST", f"/element/{next(iter(element.values()))}/click", {})

    def type(self, selector: str, text: str) -> None:
        """Type a text where a selector says, in place of what stands there."""
        element = next(iter(self._ask("POST", "/element", {"using": "css selector", "value": selector}).values()))
        self._ask("POST", f"/element/{element}/clear", {})
        self._ask("POST", f"/element/{element}/value", {"text": text})

    def resize(self, width: int, height: int = 800) -> None:
        """Give the page another size in pixels, such as that of a phone."""
        params = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._ask("POST", "/goog/cdp/execute", {"cmd": "Emulation.setDeviceMetricsOverride", "params": params})

    def prefer(self, scheme: str = "light", motion: str = "reduce") -> None:
        """Prefer a colour scheme, light or dark, and as little motion as can be, or "no-preference"."""
        wishes = {"prefers-color-scheme": scheme, "prefers-reduced-motion": motion}
        features = [{"name": name, "value": value} for name, value in wishes.items()]
        command = {"cmd": "Emulation.setEmulatedMedia", "params": {"features": features}}
        self._ask("POST", "/goog/cdp/execute", command)

    def log(self) -> list[str]:
        """The complaints of the page since the last call: errors of scripts and refused loads."""
        return [entry["message"] for entry in self._ask("POST", "/se/log", {"type": "browser"})]

    def picture(self, path: Path) -> None:
        """Write what the window shows as PNG."""
        path.write_bytes(base64.b64decode(self._ask("GET", "/screenshot")))

    def _start(self, log: Path) -> None:
        """Read in the log of chromedriver at which port it listens, and open a window."""
        end = time.monotonic() + SECONDS
        while not (listening := re.search(r"successfully on port (\d+)", log.read_text())):
            assert time.monotonic() < end and self.driver.poll() is None, f"no chromedriver: {log.read_text()}"
            time.sleep(0.05)
        self.port = int(listening[1])
        options = {
            "binary": shutil.which("chromium"),
            "args": [*FLAGS, f"--user-data-dir={self.folder}", "--window-size=1280,1200"],
        }
        asked = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self.session = "/" + self._ask("POST", "", {"capabilities": {"alwaysMatch": asked}})["sessionId"]

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        url = f"http://127.0.0.1:{self.port}/session{self.session}{path}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # it is on this machine
        with opener.open(request, timeout=SECONDS) as answer:
            return json.load(answer)["value"]
