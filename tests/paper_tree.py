"""Small trees of papers for the runner's tests: bare notebooks, and a look at what a run of them leaves behind."""

import json
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

import nbformat
import psutil

PARAMETERS = 'profile = "smoke"\nseed = 0\ndevice = "auto"\nout_dir = None\nmodel = None'
RECORD = """
import json, os
claim = {"id": "fair", "statement": "the coin is fair", "source": "by eye", "scale": "mechanism",
         "measured": 0.5, "ci_low": 0.4, "ci_high": 0.6, "n": 10, "verdict": "reproduced", "reason": "",
         "paper_value": 0.5,
         "rule": {"reproduced": [{"test": "above", "bound": 0, "of": "measured", "parts": None, "need": "all"}],
                  "partly": [], "descriptive": False}}
record = {"schema": 1, "paper": "%s", "area": "games", "title": "A coin", "started": "", "wall_s": 1, "peak_rss_mb": 1,
          "threads": int(os.environ["OMP_NUM_THREADS"]), "versions": {}, "claims": [claim],
          "parameters": {"profile": profile, "seed": seed, "device": device, "model": model}}
"""
WRITE = "\nopen(f'{out_dir}/results.json', 'w').write(json.dumps(record))"
DRIVER = """
import json, signal, sys
from icl26.repro.papers import UsageError
from icl26.repro.runner import reproduce
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start with it ignored
    try:
        sys.exit(reproduce(**json.loads(sys.argv[1])))
    except UsageError as e:
        sys.exit(print(f"usage: {e}", file=sys.stderr) or 2)
"""


def measure(slug: str, before: str = "", after: str = "") -> str:
    "A cell that writes a valid results.json, with code before and after."
    return f"{RECORD % slug}\n{before}\n{WRITE}\n{after}"


class Tree:
    "Papers in a temporary folder, and runs of them."

    def __init__(self, root: Path):
        self.root, self.nbs, self.out, self.mark = root, root / "nbs", root / "runs", uuid.uuid4().hex
        self.env = {**os.environ, "ICL26_TEST": self.mark, "OMP_NUM_THREADS": "1", "ICL26_CACHE": str(root / "cache")}

    def paper(
        self,
        slug: str,
        *cells: str,
        area: str = "games",
        front: str = "",
        parameters: str = PARAMETERS,
        tag: str = "parameters",
    ) -> Path:
        "Write a paper; its reproduction holds the parameters and these cells (by default one that measures)."
        folder = self.nbs / area / slug
        folder.mkdir(parents=True, exist_ok=True)
        codes = [nbformat.v4.new_code_cell(c) for c in (parameters, *(cells or [measure(slug)]))]
        codes[0].metadata["tags"] = [tag]
        index = nbformat.v4.new_markdown_cell(f"# {slug}\n\n> A test\n\n- paper: {slug}\n- area: {area}\n{front}")
        nbformat.write(nbformat.v4.new_notebook(cells=[index]), folder / "index.ipynb")
        kernel = {"kernelspec": {"name": "python3", "display_name": "python3", "language": "python"}}
        nbformat.write(nbformat.v4.new_notebook(cells=codes, metadata=kernel), folder / "01_reproduce.ipynb")
        return folder

    def start(self, *slugs: str, **options: object) -> subprocess.Popen:
        "Start `reproduce` in a process and session of its own."
        options = {"slugs": slugs, "out": str(self.out), "nbs": str(self.nbs), **options}
        driver = self.root / "driver.py"
        driver.write_text(DRIVER)
        return subprocess.Popen(
            [sys.executable, str(driver), json.dumps(options)],
            env=self.env,
            cwd=self.root,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def run(self, *slugs: str, **options: object) -> tuple[int, str, str]:
        "Exit code, standard output and error of `reproduce`; afterwards no process of it may be left."
        process = self.start(*slugs, **options)
        said, errors = process.communicate(timeout=240)
        self.assert_nothing_left()
        return process.returncode, said, errors

    def folder(self, slug: str, seed: int = 0, area: str = "games", profile: str = "smoke") -> Path:
        "The folder of a job."
        return self.out / area / slug / f"{profile}-s{seed}"

    def failure(self, slug: str, seed: int = 0) -> dict:
        "The record of a failed job."
        return json.loads((self.folder(slug, seed) / "failure.json").read_text())

    def done(self, slug: str, seed: int = 0) -> bool:
        "Whether a job has results and no failure."
        return (self.folder(slug, seed) / "results.json").exists() and not (
            self.folder(slug, seed) / "failure.json"
        ).exists()

    def processes(self) -> list[psutil.Process]:
        "Processes that carry this tree's mark in their environment."
        found = []
        for p in psutil.process_iter():
            try:
                if p.environ().get("ICL26_TEST") == self.mark and p.status() != psutil.STATUS_ZOMBIE:
                    found.append(p)
            except psutil.Error:
                continue
        return found

    def assert_nothing_left(self, seconds: float = 6) -> None:
        "No process of a run is left, and no half-written file."
        end = time.monotonic() + seconds
        while (left := self.processes()) and time.monotonic() < end:
            time.sleep(0.1)
        assert not left, [p.cmdline() for p in left]
        assert not list(self.out.glob("**/*.part"))


def until(condition, seconds: float = 60) -> None:
    "Wait until `condition()` is true."
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)
