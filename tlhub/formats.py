"""Formats: what rounding to a dtype may lose, and where conversions to it saturate. Numbers for error models."""

from __future__ import annotations

ROUNDOFF = {
    # half a unit in the last place of 1: the largest relative error of a rounding to nearest
    "float64": 2.0**-53,
    "float32": 2.0**-24,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
    "float8_e4m3fn": 2.0**-4,
    "float8_e5m2": 2.0**-3,
    "int32": 0.0,
}
SMALLEST = {
    # the least value above 0, of which a rounding may lose a half where relative errors say nothing
    "float64": 2.0**-1074,
    "float32": 2.0**-149,
    "float16": 2.0**-24,
    "bfloat16": 2.0**-133,
    "float8_e4m3fn": 2.0**-9,
    "float8_e5m2": 2.0**-16,
    "int8": 1.0,
    "int32": 1.0,
}
RANGE = {
    # least and largest value of the dtypes that saturate
    "float8_e4m3fn": (-448.0, 448.0),
    "float8_e5m2": (-57344.0, 57344.0),
    "int8": (-128.0, 127.0),
    "int32": (-(2.0**31), 2.0**31 - 1),
}
