"""A headless Chromium, driven over its debugging pipe: the standard library alone, and no port.

The pipe carries JSON messages that end with a zero byte: commands to Chromium on its file descriptor 3, replies
and events from it on descriptor 4.
"""

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time

NAMES = ["chromium", "chromium-browser", "google-chrome"]
# Nothing is fetched, and nothing is kept.
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-extensions",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
    "--hide-scrollbars", "--remote-debugging-pipe",
]


def find():
    """The program of a Chromium, or None."""
    return next(filter(None, map(shutil.which, [os.environ.get("CHROMIUM", ""), *NAMES])), None)


class Failed(Exception):
    """What a page or Chromium did that it should not have."""


class Browser:
    """A Chromium with one page. `problems` collects the page's exceptions and console errors."""

    def __init__(self, program):
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        commands_out, self.commands = os.pipe()
        self.replies, replies_in = os.pipe()
        line = 'exec "$0" "$@" 3<&%d 4>&%d' % (commands_out, replies_in)
        self.process = subprocess.Popen(
            ["bash", "-c", line, program, *FLAGS, f"--user-data-dir={self.profile.name}", "about:blank"],
            pass_fds=[commands_out, replies_in], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands_out)
        os.close(replies_in)
        self.buffer, self.numbers, self.session, self.problems = b"", itertools.count(1), None, []
        target = next(t for t in self.send("Target.getTargets")["targetInfos"] if t["type"] == "page")
        attach = self.send("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self.session = attach["sessionId"]
        for domain in ["Page", "Runtime", "Log", "Network"]:
            self.send(f"{domain}.enable")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.profile.cleanup()

    def send(self, method, **params):
        """The result of a command."""
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while True:
            reply = self.receive(60)
            if reply.get("id") == number:
                if "error" in reply:
                    raise Failed(f"{method}: {reply['error']['message']}")
                return reply["result"]
            self.note(reply)

    def receive(self, seconds):
        while b"\0" not in self.buffer:
            if not select.select([self.replies], [], [], seconds)[0]:
                raise Failed(f"Chromium says nothing for {seconds} s")
            more = os.read(self.replies, 1 << 20)
            if not more:
                raise Failed("Chromium has ended")
            self.buffer += more
        message, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(message)

    def note(self, event):
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description", details["text"]))
        elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(params["entry"]["text"])

    def evaluate(self, expression):
        """The value of a JavaScript expression, awaited if it is a promise."""
        result = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise Failed(f"{expression}: {result['result'].get('description')}")
        return result["result"].get("value")

    def until(self, expression, seconds=120):
        """Waits for an expression to be true, and returns its value."""
        deadline = time.monotonic() + seconds
        while not (value := self.evaluate(expression)):
            if time.monotonic() > deadline:
                raise Failed(f"not within {seconds} s: {expression}\n{self.evaluate('document.body.innerText')}")
            time.sleep(0.02)
        return value

    def open(self, url, width, height, dark=False):
        scheme = "dark" if dark else "light"
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.send("Page.navigate", url=url)
        self.until(f"location.href.startsWith({json.dumps(url)}) && document.readyState == 'complete'")

    def type(self, text):
        self.send("Input.insertText", text=text)

    def press(self, name, shift=False):
        codes = {"Enter": 13, "Escape": 27, "Tab": 9, " ": 32, "ArrowRight": 39}
        params = {"key": name, "windowsVirtualKeyCode": codes[name], "modifiers": 8 if shift else 0}
        if name in ("Enter", " "):
            params["text"] = "\r" if name == "Enter" else " "
        self.send("Input.dispatchKeyEvent", type="keyDown", **params)
        self.send("Input.dispatchKeyEvent", type="keyUp", **{k: v for k, v in params.items() if k != "text"})

    def screenshot(self, path):
        data = base64.b64decode(self.send("Page.captureScreenshot", format="png", optimizeForSpeed=False)["data"])
        with open(path, "wb") as file:
            file.write(data)
        return len(data)
