"""Attention on a GPU beside PyTorch's, by cuDNN where that has it and by FlashAttention-2, and beside FlashAttention-4
where that is installed, as Markdown tables.

    python benchmarks/attention_gpu.py [KERNEL ...] [--schedule NAME] [--rounds 5] [--runs 200] [--json FILE]

The problems are those of the suites of these names; a machine without compilers measures what another has built:

    SUITES=registry/tlhub_registry/workloads/suites
    TLHUB_CACHE_DIR=DIR tlhub cache prewarm --from $SUITES/attention.toml --device h200 --schedule hopper
    TLHUB_STORES=DIR TLHUB_COMPILE=never python benchmarks/attention_gpu.py --schedule hopper

Times are the GPU's alone, of graphs of launches, all sides in turn in one process on the same random data; a ratio
above 1 means that tlhub is faster. Errors are against float64, of one key head of the last sequence: the norm of what
is wrong over that of what is right, the worst of the results, and ours over the best of theirs. Memory is what a call
takes beyond its arrays. Bits are how many of so many runs gave those of the first, while products of random sizes ran
beside; a backward promises that with ``--deterministic`` alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tlhub.specs import Kernel, Problem
from tlhub.workload import Item

KERNELS = ("attention", "attention_bwd", "attention_varlen", "attention_decode")

PEERS = ("torch", "torch-flash", "torch-flash4")

SECONDS = 0.02
"""Of a side's round."""

LOGITS = 1 << 26
"""Logits in float64 at a time."""

Tensors = dict[str, Any]
Call = Callable[[], Sequence[Any]]
Row = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", nargs="*", metavar="KERNEL", help=f"some of {', '.join(KERNELS)} (default: all)")
    parser.add_argument("--schedule", help="this schedule and no other")
    parser.add_argument("--deterministic", action="store_true", help="measure the backward that repeats its bits")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--json", metavar="FILE", help="write everything that was found there too")
    options = parser.parse_args()
    unknown = [name for name in options.kernels if name not in KERNELS]
    if unknown:
        parser.error(f"no kernel {unknown[0]!r} here; there are: {', '.join(KERNELS)}")
    kernels = options.kernels or KERNELS
    found = {name: table(requests(name, options), options.rounds, options.runs) for name in kernels}
    if options.json:
        Path(options.json).write_text(json.dumps(found), "utf-8")
    return int(any("fault" in row for rows in found.values() for row in rows))


def requests(kernel: str, options: argparse.Namespace) -> Iterator[Row]:
    """Yield the problems of a suite, as ``tlhub.get`` takes them."""
    from tlhub.bench.suite import read

    chosen = {"deterministic": True} if options.deterministic and kernel == "attention_bwd" else {}
    for item in read(kernel):
        assert isinstance(item, Item), item
        yield {**item.request(), "schedule": options.schedule, **chosen}


def table(asked: Iterable[Row], rounds: int, runs: int) -> list[Row]:
    """Print a line for each problem, and return what was found; a problem that cannot be measured has its ``fault``."""
    sides = "to PyTorch | to its FlashAttention-2 | to FlashAttention-4"
    print(f"| problem | GPU | {sides} | error, to theirs | memory | bits |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    rows = []
    for request in asked:
        rows.append(measured(request, rounds, runs))
        print(line(rows[-1]), flush=True)
    taken = [list(row["seconds"].values()) for row in rows if "seconds" in row]
    ratios = [min(theirs) / ours for ours, *theirs in taken if theirs]
    if ratios:
        print(f"\nto the better: geomean {statistics.geometric_mean(ratios):.3f}, least {min(ratios):.2f}\n")
    return rows


def line(row: Row) -> str:
    """Return a row as one of Markdown's."""
    if "fault" in row:
        return f"| {row['problem']} | {row['fault']} | | | | | | |"
    (ours, *_), (error, *theirs) = row["seconds"].values(), row["errors"].values()
    ratios = [f"{row['seconds'][name] / ours:.2f}" if name in row["seconds"] else "" for name in PEERS]
    to_theirs = f", {error / min(theirs):.2f}" if theirs else ""
    bits = f"{row['same']} of {row['runs']}" if row["repeats"] else ""
    return (
        f"| {row['problem']} | {ours * 1e6:.1f} us | {' | '.join(ratios)} | {error:.1e}{to_theirs} "
        f"| {row['memory'] / 2**20:.1f} MiB | {bits} |"
    )


def measured(request: Row, rounds: int, runs: int) -> Row:
    """Return what was found of a problem: by side ``seconds`` and ``errors``, the bytes of ``memory``, and how many of
    the ``runs`` gave the ``same`` bits; or its ``fault``."""
    from tlhub import catalog
    from tlhub.errors import describe
    from tlhub.explanation import show_problem
    from tlhub.problem import make

    kernel, shape, dtype = catalog.load().kernel(request["kernel"]), request["shape"], request["dtype"]
    options = {name: value for name, value in request.items() if name in {o.name for o in kernel.options}}
    problem = make(kernel, shape, dtype, options)
    row: Row = {"problem": " ".join([show_problem(problem), *(n for n, value in options.items() if value)])}
    try:
        return row | examined(kernel, problem, request, rounds, runs)
    except Exception as error:
        return row | {"fault": describe(error).splitlines()[0]}


def examined(kernel: Kernel, problem: Problem, request: Row, rounds: int, runs: int) -> Row:
    import torch

    from tlhub import hub
    from tlhub.bench import gpu
    from tlhub.problem import signature
    from tlhub.testing.data import default_scalars
    from tlhub.testing.devices import TorchArrays, drawn

    compiled, sign, scalars = hub.get(**request), signature(kernel, problem), default_scalars(kernel, problem)
    arrays, scale = TorchArrays("cuda:0"), scalars["scale"]
    arrays.free()  # what the problem before has left

    def ours(inputs: Tensors) -> Call:
        results = [arrays.empty(t) for t in sign.outputs]
        out = results[0] if len(results) == 1 else tuple(results)

        def call() -> Sequence[Any]:
            compiled(*inputs.values(), out=out)
            return results

        return call

    first = drawn(kernel, problem, scalars, arrays, 0)
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    copies = max(1, min(8, math.ceil(2 * cache / sum(x.nbytes for x in first.values()))))
    sets = [first, *(drawn(kernel, problem, scalars, arrays, 100 * n) for n in range(1, copies))]
    sides = [{"tlhub": ours(inputs), **rivals(kernel, problem, inputs, scalars)} for inputs in sets]
    calls = {name: [side[name] for side in sides] for name in sides[0]}
    taken = gpu.in_turn(calls, arrays.wait, gpu.TorchGraphs(arrays.wait), rounds, SECONDS)
    repeats = bool(problem.option.get("deterministic", True))
    return {
        "seconds": {name: statistics.median(found["device"]) for name, found in taken.items()},
        "errors": {name: error(problem, first, scale, call()) for name, call in sides[0].items()},
        "memory": memory(sides[0]["tlhub"]),
        "repeats": repeats,
        "runs": runs,
        "same": same(sides[0]["tlhub"], runs) if repeats else 0,
    }


def rivals(kernel: Kernel, problem: Problem, given: Tensors, scalars: dict[str, float]) -> dict[str, Call]:
    """Return the calls of those peers that compute *problem*, with results as its contract lays them out."""
    from tlhub.bench.measure import peers_of
    from tlhub.testing.data import function

    found = {}
    for name, path in peers_of(kernel, "cuda").items():
        with contextlib.suppress(NotImplementedError, ImportError):
            found[name] = laid_out(problem, function(path)(problem, given, scalars))
    return found


def laid_out(problem: Problem, call: Call) -> Call:
    """Return *call* with its results of whole arrays as (B, S, H, D), and of sequences without the lse."""
    if problem.kernel == "attention_varlen":
        return lambda: call()[:1]
    if problem.kernel == "attention_bwd":
        return lambda: [x.transpose(1, 2) for x in call()]
    return lambda: [call().transpose(1, 2)]


# -- errors, memory, bits --------------------------------------------------------------------------


def error(problem: Problem, given: Tensors, scale: float, results: Sequence[Any]) -> float:
    """Return the largest relative error of *results* at one key head of the last sequence, by norms."""
    cut = cutter(problem, given)
    wanted = exact({name: cut(name, given[name]) for name in given.keys() & {"dout", *"qkv"}}, problem, scale)
    pairs = [(cut(name, got), want) for got, (name, want) in zip(results, wanted.items(), strict=False)]
    return max(float((got - want).norm() / want.norm()) for got, want in pairs)


def cutter(problem: Problem, given: Tensors) -> Callable[[str, Any], Any]:
    """Return what takes from an array, by its name, the last sequence's last key head or the query heads that share it,
    as (positions, heads, channels) in float64."""
    sharing = int(problem.dim["H"]) // int(problem.dim["H_kv"])

    def cut(name: str, x: Any) -> Any:
        keys = name in ("k", "v", "dk", "dv")
        if "starts" in given:
            begin, end = given["starts_kv" if keys else "starts"][-2:].tolist()
            x = x[begin:end]
        elif keys and "table" in given:
            x = x[given["table"][-1].long()].flatten(0, 1)
        else:
            x = x[-1]
        if keys and "lengths" in given:
            x = x[: int(given["lengths"][-1])]
        return x[:, -1:].double() if keys else x[:, -sharing:].double()

    return cut


def exact(x: Tensors, problem: Problem, scale: float) -> Tensors:
    """Return o, or where there is a dout dq, dk and dv, of the arrays (positions, heads, channels) of one key head."""
    import torch

    q, k, v = x["q"].transpose(0, 1), x["k"][:, 0], x["v"][:, 0]
    (heads, queries, _), keys = q.shape, len(k)
    dout = x["dout"].transpose(0, 1) if "dout" in x else None
    o, dq = q.new_empty(heads, queries, v.shape[1]), torch.empty_like(q)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    step = max(1, LOGITS // max(1, heads * keys))
    for rows in (slice(i, min(i + step, queries)) for i in range(0, queries, step)):
        logits = scale * q[:, rows] @ k.T
        if problem.option["causal"]:
            place = torch.arange(rows.start, rows.stop, device=q.device) + keys - queries
            logits.masked_fill_(torch.arange(keys, device=q.device) > place[:, None], -math.inf)
        weights = logits.softmax(-1)
        o[:, rows] = weights @ v
        if dout is not None:
            delta = (dout[:, rows] * o[:, rows]).sum(-1, keepdim=True)
            slopes = scale * weights * (dout[:, rows] @ v.T - delta)
            dq[:, rows] = slopes @ k
            dk += (slopes.mT @ q[:, rows]).sum(0)
            dv += (weights.mT @ dout[:, rows]).sum(0)
    if dout is None:
        return {"o": o.transpose(0, 1)}
    return {"dq": dq.transpose(0, 1), "dk": dk[:, None], "dv": dv[:, None]}


def memory(call: Call) -> int:
    """Return the bytes of PyTorch's that *call* takes for its time, and gives back."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return int(torch.cuda.max_memory_allocated()) - before


def same(call: Call, runs: int) -> int:
    """Return how many of so many runs give the bits of the first, while another stream multiplies matrices."""
    import torch

    choice, beside = random.Random(0), torch.cuda.Stream()
    matrix = torch.randn(4096, 4096, dtype=torch.float16, device="cuda")
    first = [x.clone() for x in call()]
    torch.cuda.synchronize()
    count = 0
    for _ in range(runs):
        with torch.cuda.stream(beside):
            for size in choice.choices((64, 512, 1024, 2048, 4096), k=choice.randrange(4)):
                matrix[:size, :size] @ matrix[:size, :size]
        results = call()
        count += all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(results, first, strict=True))
    return count


if __name__ == "__main__":
    raise SystemExit(main())
