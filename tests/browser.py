"""Headless Chromium for tests, driven by chromedriver's W3C protocol with the standard library alone."""
import base64
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

FLAGS = ("--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
         "--disable-component-update --disable-sync --disable-dev-shm-usage --hide-scrollbars").split()


def find(*names):
    "The first of these programs that is on PATH, or None."
    return next((p for p in map(shutil.which, names) if p), None)


CHROMIUM, DRIVER = find("chromium", "chromium-browser", "google-chrome"), find("chromedriver", "chromium.chromedriver")
available = bool(CHROMIUM and DRIVER)


class BrowserError(RuntimeError):
    "chromedriver answered with an error."


class Browser:
    """`with Browser() as b: b.get(url); b.execute("return document.title")`.

    `width`, `height`: CSS pixels of the window. Everything that the page logged stands in `b.log()`. The browser's profile
    is a fresh folder that goes when the block ends, with every process that was started for it."""

    def __init__(self, width=1280, height=900, *, timeout=60):
        if not available:
            raise BrowserError("needs chromium and chromedriver on PATH (Debian: apt-get install chromium chromium-driver)")
        self.width, self.height, self.timeout = width, height, timeout

    def __enter__(self):
        self.folder = tempfile.mkdtemp(prefix="icl26-browser-")
        self.process = subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                        start_new_session=True, env={**os.environ, "HOME": self.folder})
        try:
            self.port = self._port()
            args = [*FLAGS, f"--user-data-dir={self.folder}/profile", f"--window-size={self.width},{self.height}"]
            caps = {"browserName": "chrome", "goog:chromeOptions": {"args": args, "binary": CHROMIUM},
                    "goog:loggingPrefs": {"browser": "ALL"}, "timeouts": {"pageLoad": 1000 * self.timeout, "script": 1000 * self.timeout}}
            self.session = None
            self.session = self._call("POST", "/session", {"capabilities": {"alwaysMatch": caps}})["sessionId"]
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc):
        try:
            if getattr(self, "session", None):
                self._call("DELETE", f"/session/{self.session}")
        except (BrowserError, OSError):
            pass                                                   # the group is ended below, whatever it answered
        finally:
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            self.process.wait()
            self.process.stdout.close()
            shutil.rmtree(self.folder, ignore_errors=True)

    def _port(self):
        "The port that chromedriver chose, from its first lines; the rest of its output is read away."
        for line in self.process.stdout:
            if m := re.search(r"started successfully on port (\d+)", line):
                threading.Thread(target=self.process.stdout.read, daemon=True).start()
                return int(m[1])
        raise BrowserError("chromedriver ended before it listened")

    def _call(self, method, path, body=None):
        data = None if method != "POST" else json.dumps(body or {}).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data=data, method=method,
                                         headers={"Content-Type": "application/json"})
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=self.timeout + 30) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as e:
            value = json.load(e)["value"]
            raise BrowserError(f"{value['error']}: {value['message'].splitlines()[0]}") from None

    def _do(self, method, path, body=None):
        return self._call(method, f"/session/{self.session}{path}", body)

    def get(self, url):
        "Open a page and wait until it has loaded."
        self._do("POST", "/url", {"url": str(url)})

    def execute(self, js, *args):
        "Run the body of a function in the page; `arguments[i]` are the `args`; a promise that it returns is waited for."
        return self._do("POST", "/execute/sync", {"script": js, "args": list(args)})

    def wait(self, js, *args, seconds=20):
        "The first true value of `js`; TimeoutError after `seconds`."
        end = time.monotonic() + seconds
        while not (value := self.execute(js, *args)):
            if time.monotonic() > end:
                raise TimeoutError(f"not true after {seconds} s: {js}")
            time.sleep(0.1)
        return value

    def cdp(self, cmd, **params):
        "A command of the DevTools protocol."
        return self._do("POST", "/goog/cdp/execute", {"cmd": cmd, "params": params})

    def emulate(self, width, height=844, *, scale=1, mobile=False, scheme=None):
        "A screen of this many CSS pixels; `scheme`: 'light' or 'dark', as prefers-color-scheme."
        self.cdp("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=mobile)
        if scheme:
            self.cdp("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    set_size = emulate

    def overflow(self):
        "How many CSS pixels the page is wider than its window: 0 when it fits."
        return self.execute("const e = document.documentElement;"
                            "return Math.max(e.scrollWidth, document.body ? document.body.scrollWidth : 0) - e.clientWidth;")

    def log(self):
        "What the page has logged since the last call: dicts with level, message, source."
        return self._do("POST", "/se/log", {"type": "browser"})

    def screenshot(self, path, *, full=False):
        "A PNG of the window, or of the whole page."
        shot = (self.cdp("Page.captureScreenshot", captureBeyondViewport=True)["data"] if full
                else self._do("GET", "/screenshot"))
        Path(path).write_bytes(base64.b64decode(shot))
        return Path(path)


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args): pass


@contextmanager
def serve(folder):
    "`with serve(folder) as url:` that folder on a free port of the loopback address."
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
