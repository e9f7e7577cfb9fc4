"""A headless Chromium, controlled through its debugging pipe, without a driver or another package.

with Browser.start() as browser:
    page = browser.open(path, width=400, scheme="dark")
    assert page.run("document.title") == "…" and not page.problems and not page.requests
"""

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
TIMEOUT = 60.0


def find_browser():
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Page:
    def __init__(self, browser, session, target):
        self._browser, self._session, self._target = browser, session, target
        self.problems: list[str] = []
        """Exceptions of scripts, and errors in the console."""
        self.requests: list[str] = []
        """Addresses that the page requested."""

    def call(self, method, **parameters):
        return self._browser.call(method, parameters, self._session)

    def run(self, expression):
        """The value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise AssertionError(answer["exceptionDetails"])
        return answer["result"].get("value")

    def _notice(self, method, about):
        if method == "Runtime.exceptionThrown":
            details = about["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Log.entryAdded" and about["entry"]["level"] == "error":
            self.problems.append(about["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and about["type"] in ("error", "assert"):
            self.problems.append(json.dumps(about["args"]))
        elif method == "Network.requestWillBeSent" and about.get("type") != "Document":
            if not about["request"]["url"].startswith("data:"):
                self.requests.append(about["request"]["url"])


class Browser:
    def __init__(self, program):
        self._profile = tempfile.mkdtemp(prefix="browser-")
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        arguments = [
            program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
            "--no-first-run", "--disable-background-networking", "--disable-extensions", "--remote-debugging-pipe",
            f"--user-data-dir={self._profile}", "about:blank",
        ]  # fmt: skip
        # The browser reads from descriptor 3 and writes to 4, which the shell sets up.
        command = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, "browser", *arguments],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer = b""
        self._last = 0
        self._pages: dict[str, Page] = {}

    @classmethod
    def start(cls):
        program = find_browser()
        assert program is not None
        return cls(program)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.close(self._write)
        os.close(self._read)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # its own group: helpers of the browser included
        self._process.wait()
        shutil.rmtree(self._profile, ignore_errors=True)

    def open(self, path, width=1600, scheme="light"):
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        page = self._pages[session] = Page(self, session, target)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        page.call("Emulation.setEmulatedMedia", media="", features=features)
        page.call("Page.navigate", url=path.resolve().as_uri())
        deadline = time.monotonic() + TIMEOUT
        while page.run("document.readyState + location.protocol") != "completefile:":
            assert time.monotonic() < deadline, "the page did not load"
        page.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        return page

    def call(self, method, parameters, session=None):
        self._last += 1
        message = {"id": self._last, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + TIMEOUT
        while True:
            answer = self._receive(deadline)
            if answer.get("id") == self._last:
                assert "error" not in answer, answer
                return dict(answer["result"])
            if (page := self._pages.get(answer.get("sessionId", ""))) is not None:
                page._notice(answer["method"], answer["params"])

    def _receive(self, deadline):
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            received = os.read(self._read, 2**20)
            assert received, "the browser has ended"
            self._buffer += received
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))
