"""The checks that what is read has been read when a barrier is told so, and that it has been written."""

from __future__ import annotations

import cuda_lab
import pytest
import sass

SOURCE = """
extern "C" __global__ void axpy(float *c, const float *a, const float *b, float alpha, int n) {
  __shared__ float row[64];
  __shared__ unsigned long long barrier;
  unsigned from = __cvta_generic_to_shared(row + 2 * threadIdx.x), to = __cvta_generic_to_shared(&barrier);
  float x = 0, y = 0;
  auto load = [&] { asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x), "=f"(y) : "r"(from) : "memory"); };
  auto fence = [] { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); };
  auto use = [&] { asm volatile("st.global.v2.f32 [%0], {%1, %2};" ::"l"(c), "f"(x), "f"(y) : "memory"); };
  auto arrive = [&] { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(to) : "memory"); };
  auto expect = [&] { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 16;" ::"r"(to) : "memory"); };
  BODY
}
"""
IN_A_LOOP = "#pragma unroll 1\nfor (int i = 0; i < n; ++i) {{ {} }}\nuse();"


@pytest.mark.parametrize(
    ("body", "early"),
    [
        ("load(); arrive(); use();", 1),
        ("load(); fence(); arrive(); use();", 0),
        ("load(); use(); arrive();", 0),
        ("load(); expect(); use();", 0),  # nothing is released by what is yet to come
        ("if (n > 7) load(); arrive(); use();", 1),
        ("load(); if (n > 7) fence(); arrive(); use();", 1),
        (IN_A_LOOP.format("arrive(); use(); load();"), 1),
        (IN_A_LOOP.format("use(); arrive(); load();"), 0),
        (IN_A_LOOP.format("fence(); arrive(); use(); load();"), 0),
    ],
)
def test_a_load_that_an_arrival_may_pass_by_is_found(body, early):
    made = cuda_lab.build("cuda_programs:axpy", cuda_lab.AXPY, config={"source": SOURCE.replace("BODY", body)})
    found = sass.early_arrivals(made.linked)
    assert len(found.get("axpy", [])) == early
    assert all("SYNCS.ARRIVE" in said and "LDS.64" in said for said in found.get("axpy", []))


AHEAD = """
extern "C" __global__ void axpy(float *c, const float *a, const float *b, float alpha, int n) {
  auto wait = [] { asm volatile("griddepcontrol.wait;" ::: "memory"); };
  BODY
}
"""


@pytest.mark.parametrize(
    ("body", "early"),
    [
        ("wait(); c[n] = a[n];", 0),
        ("float x = b[0]; wait(); c[n] = a[n] + x;", 1),
        ("float x = 0; if (n > 7) x = b[0]; wait(); c[n] = a[n] + x;", 1),
        ("if (n > 7) { c[0] = b[0]; return; } wait(); c[n] = a[n];", 1),
        ("for (int i = 0; i < n; ++i) { wait(); c[i] = a[i]; }", 0),
        ("c[n] = a[n] + b[0];", 0),  # it waits for nothing
    ],
)
def test_a_load_ahead_of_the_wait_for_the_kernel_before_is_found(body, early):
    source = AHEAD.replace("BODY", body)
    made = cuda_lab.build("cuda_programs:axpy", cuda_lab.AXPY, config={"source": source})
    found = sass.early_loads(made.linked).get("axpy", [])
    assert len(found) == early and all("LDG" in said for said in found)
