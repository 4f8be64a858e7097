"""``tracer completion``: prints the script by which a shell completes commands, options and values.

The scripts are made from the command line itself when it changes (`tests/docs/completion_scripts.py`) and lie
beside this file: printing one loads nothing.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final

from tracer.studies import Command

FOLDER: Final = Path(__file__).with_name("completions")
FILES: Final = {"bash": "tracer.bash", "zsh": "_tracer", "fish": "tracer.fish"}
"""Shell → name of its script in `FOLDER`."""


def completion(options: argparse.Namespace) -> int:
    """Print the script by which a shell completes what you type."""
    sys.stdout.write((FOLDER / FILES[options.shell]).read_text(encoding="utf-8"))
    return 0


def add_commands(command: Command, wanted: str) -> None:
    """Put ``completion`` on the command line."""
    one = command("completion", completion,
        "  source <(tracer completion bash)                 in this shell, or as a line of ~/.bashrc\n"
        "  tracer completion bash > ~/.local/share/bash-completion/completions/tracer\n"
        "  tracer completion zsh > ~/.zfunc/_tracer         a folder of fpath, before compinit\n"
        "  tracer completion fish > ~/.config/fish/completions/tracer.fish")  # fmt: skip
    one.add_argument("shell", choices=list(FILES), help="which shell")
