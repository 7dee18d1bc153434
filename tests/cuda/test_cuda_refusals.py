"""A GPU that does not take an entry, from the lookup to the launch, with the fake driver."""

from __future__ import annotations

import os
import warnings
from dataclasses import replace

import cuda_lab
import pytest
from cuda_array import Array

from tlhub.specs import Schedule

NAMES = ("best", "second")


def looked_up(cache, state, fails):
    """Look up and call ``axpy``, which two schedules serve, while the driver *fails*, then again with no table.

    Returns the schedules that launched, what was warned of, and the error.
    """
    from tlhub import catalog, hub, refusals

    os.environ.update(TLHUB_CACHE_DIR=cache, XDG_STATE_HOME=state)
    known = catalog.load()
    facts = replace(known.targets["cuda"].models["h200"], index=0, driver=580)
    schedules = tuple(
        Schedule(name, "axpy", 1, 1, ("cuda",), "cuda", "cuda_programs:axpy", symbolic=("N",), priority=-i)
        for i, name in enumerate(NAMES)
    )
    changed = replace(
        known,
        kernels={**known.kernels, "axpy": cuda_lab.AXPY},
        schedules={"axpy": schedules},
        targets={"cuda": replace(known.targets["cuda"], devices=lambda: (facts,))},
        owners={("axpy", name): replace(known.plugins[0], distribution="somebody", editable=False) for name in NAMES},
    )
    hub.load = catalog.load = lambda: changed
    said, error = [], None
    cuda_lab.fake()
    for failure in (*fails, None):
        hub.forget()
        refusals.forget()
        kernel = hub.get("axpy", ("N",), "float32", device="cuda:0")
        if failure:
            cuda_lab.fake().fake_fail(failure[0].encode(), *failure[1:])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                kernel(Array((9,), 1 << 20), Array((9,), 2 << 20), out=Array((9,), 3 << 20))
                error = None
            except Exception as raised:
                error = f"{type(raised).__name__}: {raised}"
        launches = cuda_lab.Said(cuda_lab.take(), None).launches()
        said.append((kernel.schedule, len(launches), error, [str(w.message) for w in caught]))
    return said


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache that each kernel is built into once."""
    cuda_lab.needs_nvcc()
    return tmp_path_factory.mktemp("refused")


@pytest.mark.parametrize(
    "failure",
    [("cuLibraryLoadData", 0, 209), ("cuKernelGetFunction", 0, 222), ("cuLaunchKernelEx", 0, 1)],
    ids=lambda f: f[0],
)
def test_the_next_candidate_serves_from_then_on(fresh, cache, tmp_path, failure):
    (first, launches, error, warned), (then, again, _, quiet) = fresh().do(
        looked_up, str(cache), str(tmp_path / "state"), [failure]
    )
    assert error is None and (first, then) == ("second", "second") and again == 1 and not quiet
    assert launches == (2 if failure[0] == "cuLaunchKernelEx" else 1)  # the one that failed, too
    assert any("'second'" in text and "in the place of 'best'" in text for text in warned)
    assert len(list(cache.glob("v1/*/*/*/*/entry.json"))) == 2


@pytest.mark.parametrize("failure", [("cuLaunchKernelEx", 0, 700), ("cuLibraryLoadData", 0, 2)])
def test_what_no_other_code_would_mend_is_told(fresh, cache, tmp_path, failure):
    (first, _, error, warned), (then, again, _, _) = fresh().do(
        looked_up, str(cache), str(tmp_path / "state"), [failure]
    )
    assert (first, then, again, warned) == ("best", "best", 1, []) and error.startswith("DeviceError: axpy: ")
    assert ("this process must restart" in error) == (failure[2] == 700)
    assert not (tmp_path / "state").exists()
