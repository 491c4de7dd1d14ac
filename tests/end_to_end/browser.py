"""A headless browser, where this machine has one: what a page shows, and what it complains of."""

import shutil
import subprocess
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


class Browser:
    """Opens each page in a fresh profile below `directory`."""

    def __init__(self, program: str, directory: Path) -> None:
        self._program = program
        self._directory = directory

    def text_of(self, url: str) -> tuple[str, str]:
        """The page's elements after a while, and what the browser said of it."""
        return self._run(url, "--dump-dom", "--virtual-time-budget=4000")

    def picture_of(self, url: str, size: str) -> bytes:
        file = self._directory / "page.png"
        self._run(url, f"--screenshot={file}", f"--window-size={size}", "--hide-scrollbars")
        return file.read_bytes()

    def _run(self, url: str, *flags: str) -> tuple[str, str]:
        command = [self._program, "--headless", "--no-sandbox", "--disable-gpu", "--timeout=3000"]
        command += [f"--user-data-dir={self._directory}/profile", "--enable-logging=stderr"]
        done = subprocess.run(
            [*command, *flags, url], capture_output=True, text=True, timeout=200, check=True
        )
        said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
        return done.stdout, "\n".join(said)


def browser_program() -> str | None:
    return next((found for name in NAMES if (found := shutil.which(name))), None)
