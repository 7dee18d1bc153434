"""The program of attention of 8-bit floats on Hopper's tensor cores: v is laid across, then attended to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tlhub.build.program import Branch, CudaProgram, Launch, Parameter
from tlhub.cuda import tensor_cores
from tlhub.specs import DTYPES, Config, Problem
from tlhub_attention.cuda import code
from tlhub_attention.hopper.forward_plan import chunk, round_up
from tlhub_attention.hopper.fp8_plan import Plan, part, row

_SERVED = f"H_kv > 0 && H % H_kv == 0 && S < {code.MOST} && S_kv < {code.MOST}"
_PLAIN = "softcap == 0 && scale > 1e-30"  # as in forward_program; factors on the device are looked at there
_FILES = (
    *("fp8_call.cuh", "fp8_rows.cuh", tensor_cores.FILE, "softmax.cuh"),
    *("forward_hopper.cuh", "fp8_across.cuh", "fp8_hopper.cuh"),
)
_ACROSS_KEYS, _ACROSS_THREADS = 128, 256  # of a block that lays v across, as fp8_across.cuh has them
_PTX = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}


def program(problem: Problem, config: Config, arch: str) -> CudaProgram:
    """Return the program of the plans in *config*; what tensor maps cannot take is computed row by row."""
    chosen = [Plan(*Plan.parse(text)) for text in str(config["plans"]).split()]
    kernels = [_Kernel(problem, plan, False) for plan in chosen] + [_Kernel(problem, chosen[-1].capped, True)]
    ptx, (_, d_v) = _PTX[dict(problem.dtypes)["q"]], _channels(problem)
    source = [
        "#include <cuda_fp8.h>",
        f"constexpr bool SCALED = {str(problem.option['scaled']).lower()};",
        code.source(problem, *_FILES),
        *(_product("QK", ptx, ptx, keys, 0) for keys in sorted({kernel.plan.keys for kernel in kernels})),
        _product("PV", "e4m3", ptx, part(d_v), 4),
        *(kernel.instance() for kernel in kernels),
    ]
    return CudaProgram("\n".join([*source, ""]), (*_branches(problem, kernels), Branch((_rows(problem),), _SERVED)))


def _product(name: str, a_type: str, b_type: str, columns: int, registers: int) -> str:
    """Return one product of fp8_hopper.cuh, whose A is in so many *registers*, or by a descriptor in shared memory."""
    count = columns // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    a = [f'"r"(a[{i}])' for i in range(registers)] or ['"l"(a)']
    first = ", ".join(f"%{count + i}" for i in range(len(a)))
    parameter = f"const uint32_t (&a)[{registers}]" if registers else "uint64_t a"
    b, add = (f"%{count + len(a) + i}" for i in range(2))
    return f"""
template <> struct fp8::{name}<{columns}> {{
  static __device__ __forceinline__ void add(float (&sum)[{count}], {parameter}, uint64_t b, int add) {{
    asm volatile(
        "{{\\n.reg .pred add;\\nsetp.ne.b32 add, {add}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{columns}k32.f32.{a_type}.{b_type}"
        " {{{sums}}}, {f"{{{first}}}" if registers else first}, {b}, add, 1, 1;\\n}}"
        : {", ".join(f'"+f"(sum[{i}])' for i in range(count))}
        : {", ".join(a)}, "l"(b), "r"(add));
  }}
}};
"""


def _branches(problem: Problem, kernels: Sequence[_Kernel]) -> Iterator[Branch]:
    """Yield the branches of *kernels*: plain logits by the cheapest plan, others by the last kernel; o by bulk copies,
    or element by element where no tensor map can be made of it."""
    fits = [_SERVED, *(code.mappable(name, 1) for name in "qkv")]
    *plain, _ = kernels
    for i, kernel in enumerate(kernels):
        cheapest = [f"{kernel.price} <= {other.price}" for other in plain[i + 1 :]]
        sizes = [f"{kernel.tiles} < {code.MOST}", f"B * H_kv * {kernel.places} < {4 * code.MOST}"]
        when = " && ".join([*fits, *sizes, *([] if kernel.capped else [_PLAIN, *cheapest])])
        bulk = f"{when} && {code.mappable('o', _item(problem))}"
        yield Branch((kernel.lay_across(), kernel.launch(direct=False)), bulk, workspace=kernel.room)
        yield Branch((kernel.lay_across(), kernel.launch(direct=True)), when, workspace=kernel.room)


class _Kernel(NamedTuple):
    """A kernel of *plan*; ``capped``: for logits of any scale, with and without a soft cap."""

    problem: Problem
    plan: Plan
    capped: bool

    @property
    def name(self) -> str:
        return f"fp8_{self.plan}" + ("_capped" if self.capped else "")

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The channels of q and of v, and the bytes of an element of o."""
        return (*_channels(self.problem), _item(self.problem))

    @property
    def tiles(self) -> str:
        return f"B * H * CEIL_DIV(S, {self.plan.queries})"

    @property
    def places(self) -> str:
        """Of keys, for which v across has room: whole blocks of them."""
        return f"CEIL_DIV(S_kv, {self.plan.keys}) * {self.plan.keys}"

    @property
    def tiles_across(self) -> str:
        return f"B * H_kv * CEIL_DIV({self.places}, {_ACROSS_KEYS})"

    @property
    def _values(self) -> tuple[Parameter, ...]:
        """What kernels have of v across."""
        return Parameter("void *", "WORKSPACE"), Parameter("unsigned", self.places)

    @property
    def room(self) -> str:
        """The bytes of v across."""
        return f"B * H_kv * {round_up(self.sizes[1], 32)} * {self.places}"

    @property
    def price(self) -> str:
        return self.plan.price(*self.sizes)

    def instance(self) -> str:
        """Return the kernel's source, to follow fp8_hopper.cuh."""
        plan, sizes = self.plan, self.sizes
        numbers = (plan.groups, plan.keys, plan.tiles(*sizes), plan.buffers(*sizes))
        return f"FP8({self.name}, {plan.shared(*sizes)}, {str(self.capped).lower()}, {', '.join(map(str, numbers))})"

    def launch(self, direct: bool) -> Launch:
        """Return the launch of as many blocks as fit; *direct*: o is stored element by element."""
        d, d_v, item = self.sizes
        return Launch(
            kernel=self.name,
            grid=(f"({self.tiles} < SMS ? {self.tiles} : SMS)", 1, 1),
            block=(self.plan.threads, 1, 1),
            parameters=(
                code.tensor_map(self.problem, "q", (row(d), self.plan.queries)),
                code.tensor_map(self.problem, "k", (row(d), self.plan.keys)),
                code.tensor_map(self.problem, "q", (row(d), 16))
                if direct
                else code.tensor_map(self.problem, "o", (chunk(d_v, item), 16)),
                Parameter("int", int(direct)),
                *self._values,
                *_parameters(self.problem),
            ),
            shared=self.plan.shared(*self.sizes),
            programmatic=True,
        )

    def lay_across(self) -> Launch:
        """Return the launch that lays v across, in scratch memory."""
        return Launch(
            kernel="fp8_across",
            grid=(self.tiles_across, 1, 1),
            block=(_ACROSS_THREADS, 1, 1),
            parameters=(*self._values, *code.parameters(self.problem)),
            programmatic=True,
        )


def _channels(problem: Problem) -> tuple[int, int]:
    """Return the channels of q and of v."""
    return int(problem.dim["D"]), int(problem.dim["D_v"])


def _item(problem: Problem) -> int:
    """Return the bytes of an element of o."""
    return DTYPES[dict(problem.dtypes)["o"]][1] // 8


def _rows(problem: Problem) -> Launch:
    rows = "CEIL_DIV(B * H * S, 4)"
    grid = (f"({rows} < SMS * 16 ? {rows} : SMS * 16)", 1, 1)
    return Launch("fp8_rows", grid, (128, 1, 1), _parameters(problem))


def _parameters(problem: Problem) -> tuple[Parameter, ...]:
    """Return the values of fp8_call.cuh's SCALED_PARAMETERS."""

    def factors(name: str) -> tuple[Parameter, ...]:
        if not problem.option["scaled"]:
            return tuple(Parameter(ctype, 0) for ctype in ("void *", "int64_t", "int64_t"))
        steps = (Parameter("int64_t", f"STRIDE({name}, {dim})") for dim in range(2))
        return (Parameter("void *", f"DATA({name})"), *steps)

    return (*code.parameters(problem), *(x for name in "qkv" for x in factors(f"{name}_scale")))
