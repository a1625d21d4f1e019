"""Break one guarded line at a time, in a copy of the package, and see that a test notices: `python tests/mutations.py [WORD]`.

Prints which test caught each mutant. With a word, only the mutants that have it in their description or file. The exit status
is 1 if one survives, or if a line to break isn't there exactly once.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from mutants import MUTANTS, Mutant
from mutants_of_prefixes import MUTANTS_OF_PREFIXES

ROOT = Path(__file__).parent.parent

NO_SHRINKING = """
from hypothesis import Phase, settings
settings.register_profile("mutations", phases=[Phase.generate])
settings.load_profile("mutations")
"""


def check(mutant: Mutant, folder: Path) -> str | None:
    """The test that catches it, None if it survives."""
    file = folder / "hf_paged" / mutant.file
    text = file.read_text()
    file.write_text(text.replace(mutant.old, mutant.new))
    try:
        environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
        words = re.findall(r"'[^']*'|\S+", mutant.tests)
        tests = [word.strip("'") for word in words]
        tests = [f"tests/{word}" if word.startswith("test_") else word for word in tests]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "--tb=no", "-rfE", *tests],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    finally:
        file.write_text(text)
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout}")
    return found[1].removeprefix("tests/") if found else None


def main() -> int:
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    bad = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # As an installed package lies: hf_paged.patches is a folder of its own in the sources.
        shutil.copytree(ROOT / "hf_paged", folder / "hf_paged")
        shutil.copytree(ROOT / "patches", folder / "hf_paged" / "patches")
        for part in ("tests", "examples"):
            shutil.copytree(ROOT / part, folder / part)
        shutil.copy(ROOT / "pyproject.toml", folder)
        with (folder / "tests" / "conftest.py").open("a") as conftest:
            conftest.write(NO_SHRINKING)
        for mutant in MUTANTS + MUTANTS_OF_PREFIXES:
            if word not in mutant.what and word not in mutant.file:
                continue
            text = (folder / "hf_paged" / mutant.file).read_text()
            if text.count(mutant.old) != 1:
                caught = f"NOTHING: the line to break is there {text.count(mutant.old)} times"
                bad, line = bad + 1, 0
            else:
                line = text[: text.index(mutant.old)].count("\n") + 1
                test = check(mutant, folder)
                caught, bad = test or "NOTHING", bad + (test is None)
            print(f"{mutant.file}:{line} | {mutant.what} | {caught}", flush=True)
    print(f"{bad} of them survive" if bad else "all caught")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
