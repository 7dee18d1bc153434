import pytest

import tlhub
from tlhub import testing


def test_conformance():
    testing.conformance("tlhub_plugin_xyz")


@pytest.mark.parametrize("shape", [(1, 1), (7, 1021), (64, 512), (0, 16), (3, 0)])
def test_numbers(shape):
    assert testing.check(tlhub.get("xyz_rms_norm", shape, "float32")) <= 1
