"""The picture of docs/console.md: the terminal of a run, with its live line, as an SVG.

    python -m benchmarks.console_picture docs/images/console.svg examples/grpo_sort.yaml steps=40

Starts `lockstep train` with these arguments in a terminal of tmux, and pictures it once some steps have been printed.
"""

import argparse
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS, LINES = 120, 24
LIMIT_S = 300.0


def capture(command: list[str], wanted: str) -> str:
    """What the terminal shows, with its styles, once it has a line with `wanted` and a live line. Raises SystemExit."""
    tmux = ["tmux", "-L", f"lockstep-picture-{time.monotonic_ns()}"]
    started = [*tmux, "new-session", "-d", "-s", "run", "-x", str(COLUMNS), "-y", str(LINES), shlex.join(command)]
    subprocess.run(started, check=True, timeout=30)
    deadline = time.monotonic() + LIMIT_S
    try:
        while time.monotonic() < deadline:
            taken = [*tmux, "capture-pane", "-e", "-p", "-t", "run"]
            shown = subprocess.run(taken, check=True, capture_output=True, text=True, timeout=30).stdout
            plain = Text.from_ansi(shown).plain
            if wanted in plain and " left " in plain:
                return shown
            time.sleep(0.3)
        raise SystemExit(f"nothing like {wanted!r} after {LIMIT_S:.0f} s: is the command right? {shlex.join(command)}")
    finally:
        subprocess.run([*tmux, "send-keys", "-t", "run", "C-c"], timeout=30)
        time.sleep(5)
        subprocess.run([*tmux, "kill-server"], timeout=30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path, help="an SVG")
    parser.add_argument("arguments", nargs="+", help="those of lockstep train")
    parser.add_argument("--until", default="step 20/", help="text of the line to wait for")
    chosen = parser.parse_args()
    shown = capture([sys.executable, "-m", "lockstep", "train", *chosen.arguments], chosen.until)
    with Path("/dev/null").open("w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True)
        console.print(Text.from_ansi(shown.rstrip("\n")))
        svg = console.export_svg(title="lockstep train")
        chosen.picture.write_text(re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL))  # fonts of the network
    print(chosen.picture)


if __name__ == "__main__":
    main()
