"""The processes that measure: what they answer, what they raise, and what ends them."""

from __future__ import annotations

import os
import sys
import textwrap

import pytest

from tlhub.bench.side import LeftOut, Side
from tlhub.errors import NotPrebuilt, TlhubError

pytestmark = pytest.mark.light


@pytest.fixture
def side(tmp_path, monkeypatch):
    """A process that finds these in place of the child's duties."""
    (tmp_path / "duties.py").write_text(
        textwrap.dedent(
            """
            import os
            from tlhub.bench import child
            from tlhub.bench.side import LeftOut
            from tlhub.errors import NotPrebuilt

            class Duties:
                def answer(self, x):
                    print("a library prints")
                    os.write(1, b"so does C\\n")
                    return {"twice": 2 * x}

                def environment(self):
                    return dict(os.environ)

                def left_out(self):
                    raise LeftOut("torch is not installed")

                def wrong(self):
                    raise AssertionError("c[0] is 1.0")

                def missing(self):
                    raise NotPrebuilt("nothing has it", hint="tlhub explain")

                def odd(self):
                    raise ZeroDivisionError("by zero")

                def die(self):
                    os._exit(7)

            child.Runner = Duties
            """
        )
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(
        "tlhub.bench.side._START", "import sys; sys.path[:] = {path!r}; import duties; duties.child.main()"
    )
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    with Side("numpy", 3) as opened:
        yield opened


def test_answers_survive_what_libraries_print(side):
    assert side.ask("answer", x=21) == {"twice": 42}
    assert side.ask("answer", x="a") == {"twice": "aa"}


def test_every_pool_has_the_threads_and_no_tuning_is_inherited(side):
    found = side.ask("environment")
    for name in ("TLHUB_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        assert found[name] == "3"
    assert "OPENBLAS_CORETYPE" not in found and os.environ["OPENBLAS_CORETYPE"] == "Haswell"


def test_errors_come_back_as_what_they_were(side):
    with pytest.raises(LeftOut, match="torch is not installed"):
        side.ask("left_out")
    assert not side.failed, "it is fit for what follows"
    with pytest.raises(AssertionError, match=r"c\[0\] is 1.0"):
        side.ask("wrong")
    with pytest.raises(NotPrebuilt, match="hint: tlhub explain"):
        side.ask("missing")
    with pytest.raises(TlhubError, match="numpy: ZeroDivisionError: by zero"):
        side.ask("odd")
    assert side.ask("answer", x=1) == {"twice": 2} and side.failed


def test_a_process_that_dies_is_an_error_and_not_a_hang(side):
    with pytest.raises(TlhubError, match="numpy ended with 7 while it was to die"):
        side.ask("die")
    assert side.failed
