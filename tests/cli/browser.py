"""A headless Chromium for tests of pages, driven through chromedriver; a page is opened from a file, as its user does.

Debian has both as the packages ``chromium-headless-shell`` (or ``chromium``) and ``chromium-driver``.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.request
from pathlib import Path
from typing import Any, Self

PROGRAMS = ("chromium-headless-shell", "chromium", "google-chrome")


def missing() -> str | None:
    """Returns why there is no browser here, or None."""
    if not any(map(shutil.which, PROGRAMS)):
        return "no Chromium is on the path (Debian: apt-get install chromium-headless-shell chromium-driver)"
    return None if shutil.which("chromedriver") else "no chromedriver is on the path"


class Browser:
    """One browser with one window."""

    def __init__(self) -> None:
        self._driver = subprocess.Popen(
            ["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert self._driver.stdout is not None
        port = None
        while port is None:
            line = self._driver.stdout.readline()
            assert line, "chromedriver has ended"
            port = re.search(r"started successfully on port (\d+)", line)
        self._url = f"http://127.0.0.1:{port[1]}/session"
        arguments = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        options = {"binary": next(filter(None, map(shutil.which, PROGRAMS))), "args": arguments}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"}}
        self._url += "/" + self._post("", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._request("DELETE", "", None)
        finally:
            self._driver.terminate()
            self._driver.wait(30)
            assert self._driver.stdout is not None
            self._driver.stdout.close()

    def _request(self, method: str, path: str, body: Any) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)["value"]

    def _post(self, path: str, body: Any) -> Any:
        return self._request("POST", path, body)

    def command(self, name: str, **parameters: Any) -> Any:
        """Calls the DevTools protocol."""
        return self._post("/goog/cdp/execute", {"cmd": name, "params": parameters})

    def open(self, page: Path, *, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """Opens a file in a viewport of a size in pixels, which the page sees as that of its device."""
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 700
        )
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.command("Emulation.setEmulatedMedia", features=[feature])
        self.log()
        self._post("/url", {"url": page.resolve().as_uri()})

    def run(self, script: str, *arguments: Any) -> Any:
        """Runs the body of a function in the page, and returns its value."""
        return self._post("/execute/sync", {"script": script, "args": list(arguments)})

    def press(self, *keys: str) -> None:
        """Presses keys of the keyboard, such as ``Tab``, one after the other."""
        for key in keys:
            code = {"Enter": 13, "Tab": 9, "ArrowLeft": 37, "Home": 36, " ": 32}[key]
            extra = {"text": "\r"} if key == "Enter" else {"text": key} if len(key) == 1 else {}
            for kind in ("keyDown", "keyUp"):
                self.command("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **extra)

    def log(self) -> list[str]:
        """Returns what the console has got since the last call: errors, warnings, and breaches of the policy."""
        return [entry["message"] for entry in self._post("/se/log", {"type": "browser"})]

    def requests(self) -> list[str]:
        """Returns the URLs that were asked for since the last call."""
        entries = [json.loads(entry["message"])["message"] for entry in self._post("/se/log", {"type": "performance"})]
        return [one["params"]["request"]["url"] for one in entries if one["method"] == "Network.requestWillBeSent"]
