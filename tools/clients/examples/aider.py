# /// script
# dependencies = ["aider-chat==0.86.2"]
# ///
"""Aider, asked one question from the command line, whole and streamed."""

import os
import subprocess
import sys
from pathlib import Path

from features import KEY, MODEL, QUESTION, Server, check


def ask(server: Server, *flags: str) -> None:
    """Any answer counts: the demo model does not find the sum after Aider's prompts. Without one there is no count."""
    program = Path(sys.executable).with_name("aider")
    named = ["--model", f"openai/{MODEL}", "--message", QUESTION, "--chat-mode", "ask"]
    quiet = ["--no-git", "--no-check-update", "--no-show-model-warnings", "--analytics-disable", "--map-tokens", "0"]
    quiet += ["--no-pretty", "--no-suggest-shell-commands", "--no-detect-urls", "--no-show-release-notes"]
    environ = {**os.environ, "OPENAI_API_BASE": server.v1, "OPENAI_API_KEY": KEY}
    done = subprocess.run(
        [program, *named, *quiet, *flags], env=environ, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    check(done.stdout[-300:], " received")


def chat(server: Server) -> None:
    ask(server, "--no-stream")


def stream(server: Server) -> None:
    ask(server, "--stream")
