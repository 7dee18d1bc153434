"""What happens to a product before it is written, the same for every kernel of mixed precision.

From the scaled product x (M, N), in float32:

    y = act(x + bias)
    y = act(x_0 + bias_0) (x_1 + bias_1)    with ``glu``, where x_0 is the first N/2 columns, and x_1 the others
    c = (y + residual) out_scale            rounded once, to nearest even

so SwiGLU is ``glu`` with ``epilogue="silu"``, and gates and values lie side by side in b as in a merged gate_up_proj.
float8 and int8 outputs saturate, and a NaN stays one, in int8 0; float16 and bfloat16 go to infinity. ``bias`` and
``residual`` have the dtype of c; where that is float8 or int8 they are float32.
"""

from __future__ import annotations

from collections.abc import Mapping

from tlhub.specs import Arg, Dim, Option, Problem, Scalar, Value

FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
OUTPUTS = ("bfloat16", "float16", "float32", *FLOAT8, "int8")
ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu")

HALF = Dim("N_2", default="N/2", when={"glu": True}, doc="columns of c with glu")


def _beside(out: str) -> str:
    """Return the dtype of what is added to a result of dtype *out*."""
    return "float32" if out in (*FLOAT8, "int8") else out


INPUTS = (
    *(Arg("bias", ("N",), _beside(out), {"bias": True, "out_dtype": out}) for out in OUTPUTS),
    *(
        Arg("residual", ("M", columns), _beside(out), {"residual": True, "out_dtype": out, "glu": glu})
        for glu, columns in ((False, "N"), (True, "N_2"))
        for out in OUTPUTS
    ),
)
OUTPUT = (
    Arg("c", ("M", "N"), dtype="option:out_dtype", when={"glu": False}),
    Arg("c", ("M", "N_2"), dtype="option:out_dtype", when={"glu": True}),
)
SCALARS = (Scalar("out_scale", default=1.0, doc="factor of the result"),)


def options(out_dtype: Value | Mapping[str, Value], n: str = "columns of b") -> tuple[Option, ...]:
    """Return the options of an epilogue; *out_dtype*: the default of that one; *n*: what N counts, in words."""
    return (
        Option("out_dtype", OUTPUTS, out_dtype, "the type of c; float8 and int8 saturate"),
        Option("epilogue", ACTIVATIONS, "none", "act, applied after the bias"),
        Option("glu", (False, True), False, f"the {n} are N/2 gates and then N/2 values: act(gate) value"),
        Option("bias", (False, True), False, "add bias[n] before act"),
        Option("residual", (False, True), False, "add residual[m, n] after act"),
    )


def check(problem: Problem) -> str | None:
    """Return why there can be no such epilogue, or None."""
    columns = problem.dim["N"]
    if problem.option["glu"] and isinstance(columns, int) and columns % 2:
        return f"N={columns} with glu=True; N counts gates and values, so it is even"
    return None
