"""Prewarm one part of a workload where there are no locks; print the digests of what was built."""

from __future__ import annotations

import contextlib
import json
import sys

import pytest
import serving_lab
from click.testing import CliRunner

from tlhub.cache import locks
from tlhub.cache.key import problem_digest
from tlhub.cli import cli

sys.stdin.read()  # until all have started
with pytest.MonkeyPatch.context() as patch:
    patch.setattr(locks, "keyed", lambda *_: contextlib.nullcontext(locks.Lock(False)))
    compiler = serving_lab.install(patch)
    done = CliRunner().invoke(cli, ["cache", "prewarm", *sys.argv[1:], "--json"])
counts = json.loads(done.stdout)
print(json.dumps([counts, [problem_digest(problem, arch) for _, arch, problem in compiler.made]]))
sys.exit(done.exit_code)
