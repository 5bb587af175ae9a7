"""Runs a script's main() and ends the process with what it returns, before the interpreter is taken down.

Threads of gloo may still be letting go of tensors then, and one that wants the interpreter's lock aborts the process:
in torch 2.13 about one run of six of two ranks, without tp_walk too, where somebody still holds `dist.group.WORLD`.
"""

from __future__ import annotations

import os
import runpy
import sys

sys.argv = sys.argv[1:]
verdict = runpy.run_path(sys.argv[0])["main"]()
sys.stdout.flush()
os._exit(verdict)
