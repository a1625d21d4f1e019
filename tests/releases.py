"""Run the tests against several releases of transformers, each in a virtual environment of its own.

    python tests/releases.py                              # all of RELEASES: the newest in full, CORE on the others
    python tests/releases.py --full 5.0.0 -- -k generate  # one release, every test, with arguments for pytest

An environment holds transformers and what goes with that release alone; everything else, torch above all, it takes from
the environment that runs this script. They are kept in `.venv-<release>` beside this checkout's other files, and reused.
Prints a table at the end; the exit status is the number of releases with failures.
"""

from __future__ import annotations

import argparse
import re
import site
import subprocess
import sys
import time
import venv
from pathlib import Path

RELEASES = ["5.0.0", "5.10.4", "5.17.0", "5.24.0"]
# What touches transformers, without its list of architectures. The kernels and the block tables know nothing of it.
CORE = ["attention", "beams", "cache", "decoding_modes", "enable", "enable_callers", "encoder_decoder", "generate"]
CORE += ["hybrids", "multimodal", "packing", "padding", "prefill_patch", "prefix_caching", "reuse", "text", "tree"]
CORE += [
    "enable_composites",
    "interrupted_prefill",
    "shortage",
    "soft_prompts",
    "threads",
    "turns",
    "weights",
    "windows",
]
ROOT = Path(__file__).parent.parent


def environment(release: str) -> Path:
    """The python of a virtual environment with that release of transformers."""
    folder = ROOT / f".venv-{release}"
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        own = subprocess.check_output(
            [python, "-c", "import site; print(site.getsitepackages()[0])"], text=True
        ).strip()
        shared = [path for path in sys.path if path in site.getsitepackages() or path.endswith("site-packages")]
        (Path(own) / "shared.pth").write_text("\n".join(shared) + "\n")
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, f"transformers=={release}", "-e", ROOT], check=True)
    return python


def run(release: str, arguments: list[str]) -> dict[str, int]:
    """Install and test. Returns pytest's counts, by outcome."""
    command = [environment(release), "-m", "pytest", "-rs", *arguments]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    print(done.stdout, flush=True)
    counts = {
        word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)", done.stdout[-300:])
    }
    if done.returncode and not counts.keys() & {"failed", "error"}:
        counts["error"] = 1  # no test ran
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("releases", nargs="*", default=RELEASES)
    parser.add_argument("--full", action="store_true", help="every test on every release")
    words = sys.argv[1:]
    split = words.index("--") if "--" in words else len(words)
    options, arguments = parser.parse_args(words[:split]), words[split + 1 :]
    core = [f"tests/test_{name}.py" for name in CORE]
    rows, failures = [], 0
    for release in options.releases:
        print(f"== transformers {release}", flush=True)
        start = time.monotonic()
        counts = run(release, arguments if options.full or release == RELEASES[-1] else [*core, *arguments])
        failed = counts.get("failed", 0) + counts.get("error", 0)
        failures += failed > 0
        minutes = (time.monotonic() - start) / 60
        rows.append(
            f"| {release} | {counts.get('passed', 0)} | {failed} | {counts.get('skipped', 0)} | {minutes:.1f} |"
        )
    print("\n| release | passed | failed | skipped | minutes |\n|---|---|---|---|---|", *rows, sep="\n")
    return failures


if __name__ == "__main__":
    sys.exit(main())
