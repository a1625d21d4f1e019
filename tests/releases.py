"""Run the tests against several releases of transformers, each in a virtual environment of its own.

    python tests/releases.py                       # all of RELEASES, the whole suite
    python tests/releases.py 5.0.0 -- -k generate  # one release, with arguments for pytest

Environments are kept in `.venv-<release>` beside this checkout's other files, and reused. Prints a table at the end; the
exit status is the number of releases with failures.
"""

from __future__ import annotations

import re
import subprocess
import sys
import venv
from pathlib import Path

RELEASES = ["5.0.0", "5.10.4", "5.17.0", "5.24.0"]
ROOT = Path(__file__).parent.parent


def requirements(release: str) -> list[str]:
    """The dev extra's pins, with another transformers and what goes with it."""
    text = (ROOT / "pyproject.toml").read_text()
    dev = re.search(r"^dev = \[(.*?)^\]", text, re.M | re.S)
    assert dev is not None
    pins = re.findall(r'"([^"]+)"', dev[1])
    return [f"transformers=={release}" if pin.startswith("transformers==") else pin for pin in pins]


def run(release: str, arguments: list[str]) -> str:
    """Install and test. Returns pytest's closing line."""
    folder = ROOT / f".venv-{release}"
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, "-e", str(ROOT), *requirements(release)], check=True)
    done = subprocess.run([python, "-m", "pytest", *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    print(done.stdout, flush=True)
    closing = [line for line in done.stdout.splitlines() if re.search(r"\d+ (passed|failed|error)", line)]
    return closing[-1].strip("= ") if closing else f"no test ran, exit status {done.returncode}"


def main() -> int:
    words = sys.argv[1:]
    split = words.index("--") if "--" in words else len(words)
    releases, arguments = words[:split] or RELEASES, words[split + 1 :]
    results = {}
    for release in releases:
        print(f"== transformers {release}", flush=True)
        results[release] = run(release, arguments)
    print("\n| transformers | tests |\n|---|---|")
    for release, result in results.items():
        print(f"| {release} | {result} |")
    return sum("failed" in result or "error" in result or "no test" in result for result in results.values())


if __name__ == "__main__":
    sys.exit(main())
