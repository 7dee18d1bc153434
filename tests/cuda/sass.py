"""What a kernel's machine code does, by its disassembly.

    assert sass.early_arrivals(made.linked) == {}
    assert sass.early_loads(made.linked) == {}

A launch may begin while the kernel before it still writes, and waits for it: what it loads ahead of that wait may
change. The compiler may move loads there of what it takes for constant, whatever the source says.

An arrival at an mbarrier passes by loads from shared memory that are under way, and what it releases may be overwritten
before they have read it, if a bulk copy does that. A fence before the arrival waits for them, as does whatever needs
what they load. What waits for what is in an instruction's upper bits, as Jia et al. found them (Dissecting the NVIDIA
Volta GPU Architecture via Microbenchmarking, 2018, section 2.1): the scoreboard that its result holds until it is
there, and a mask of the scoreboards that it waits for itself.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import cuda_lab

_KERNEL = re.compile(r"^\.text\.([\w$]+):")
_LABEL = re.compile(r"^(\.L_\w+):")
_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:(@\S+)\s+)?(\S+)\s*(.*?)\s*;\s+/\* 0x[0-9a-f]{16} \*/$")
_UPPER = re.compile(r"^\s+/\* (0x[0-9a-f]{16}) \*/$")
_TARGET = re.compile(r"`\((\.L_\w+)\)")
_NO_SCOREBOARD = 7


@dataclass
class Instruction:
    """One instruction; ``to`` are the places of those that may come next."""

    address: str
    predicate: str
    name: str
    operands: str
    upper: int = 0
    to: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"0x{self.address} {self.name} {self.operands}".rstrip()

    @property
    def waits(self) -> int:
        """A mask of scoreboards."""
        return self.upper >> 52 & 0x3F

    @property
    def holds(self) -> int:
        """The scoreboard of its result."""
        return self.upper >> 46 & 7


def early_arrivals(library: str | Path) -> dict[str, list[str]]:
    """Return, by kernel, the arrivals at an mbarrier with loads from shared memory under way, and the loads. Skips the
    test where there is no nvdisasm."""
    found = {name: list(_early(code)) for name, code in _kernels(_disassemble(library)).items()}
    return {name: arrivals for name, arrivals in found.items() if arrivals}


def early_loads(library: str | Path) -> dict[str, list[str]]:
    """Return, by kernel that waits for the one before, the loads from memory on a way there. Skips the test where there
    is no nvdisasm."""
    found = {name: list(_ahead(code)) for name, code in _kernels(_disassemble(library)).items()}
    return {name: loads for name, loads in found.items() if loads}


def _ahead(code: list[Instruction]) -> Iterator[str]:
    waits = {place for place, instruction in enumerate(code) if instruction.name == "ACQBULK"}
    reached, changed = {0}, [0] if waits else []
    while changed:
        place = changed.pop()
        new = set(code[place].to) - reached if place not in waits else set()
        reached |= new
        changed += new
    yield from (str(code[place]) for place in sorted(reached) if code[place].name.partition(".")[0] in ("LD", "LDG"))


def _early(code: list[Instruction]) -> Iterator[str]:
    """Follow every way through a kernel, with the loads that may be under way at each place."""
    under_way: list[frozenset[int] | None] = [frozenset(), *[None] * (len(code) - 1)]
    changed = [0]
    while changed:
        place = changed.pop()
        now = _after(code, place, under_way[place] or frozenset())
        for to in code[place].to:
            before = under_way[to]
            if before is None or not now <= before:
                under_way[to] = now | (before or frozenset())
                changed.append(to)
    for place, instruction in enumerate(code):
        loads = _waited(code, place, under_way[place] or frozenset())
        # what says how many bytes are to come ends in their number
        if loads and instruction.name.startswith("SYNCS.ARRIVE") and instruction.operands.endswith("RZ"):
            yield f"{instruction} <- {', '.join(str(code[load]) for load in sorted(loads))}"


def _waited(code: list[Instruction], place: int, loads: frozenset[int]) -> frozenset[int]:
    """Return what is left of *loads* when an instruction is issued."""
    instruction = code[place]
    if instruction.name.startswith("FENCE.VIEW.ASYNC") and not instruction.predicate:
        return frozenset()
    mask = instruction.waits
    if counted := re.match(r"SB(\d), 0x0$", instruction.operands) if instruction.name == "DEPBAR.LE" else None:
        mask |= 1 << int(counted[1])
    return frozenset(load for load in loads if not mask >> code[load].holds & 1)


def _after(code: list[Instruction], place: int, loads: frozenset[int]) -> frozenset[int]:
    left = _waited(code, place, loads)
    name, _, _ = code[place].name.partition(".")
    return left | {place} if name in ("LDS", "LDSM") and code[place].holds != _NO_SCOREBOARD else left


def _kernels(text: str) -> dict[str, list[Instruction]]:
    """Return the instructions of each kernel."""
    found: dict[str, list[Instruction]] = {}
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if match := _KERNEL.match(line):
            code = found[match[1]] = []
        elif match := _LABEL.match(line):
            labels[match[1]] = len(code)
        elif match := _INSTRUCTION.match(line):
            code.append(Instruction(match[1], match[2] or "", match[3], match[4]))
        elif match := _UPPER.match(line):
            code[-1].upper = int(match[1], 16)
    for code in found.values():
        assert code, "nvdisasm writes instructions in another way"
        _link(code, labels)
    return found


def _link(code: list[Instruction], labels: dict[str, int]) -> None:
    """Set what comes next of each instruction."""
    meets: dict[str, set[int]] = defaultdict(set)  # where threads that part meet again, by the register that tells
    for instruction in code:
        if instruction.name.startswith("BSSY") and (match := _TARGET.search(instruction.operands)):
            meets[instruction.operands.partition(",")[0]].add(labels[match[1]])
    for place, instruction in enumerate(code):
        name, _, _ = instruction.name.partition(".")
        to = {place + 1}
        if name in ("EXIT", "RET", "KILL") and not instruction.predicate:
            to = set()
        elif name == "BSYNC" and place + 1 not in meets[instruction.operands]:
            to |= meets[instruction.operands]
        elif name in ("BRA", "CALL") and (match := _TARGET.search(instruction.operands)):
            always = name == "BRA" and not instruction.predicate and instruction.operands.startswith("`")
            to = {labels[match[1]]} | (set() if always else to)
        instruction.to = tuple(sorted(number for number in to if number < len(code)))


def _disassemble(library: str | Path) -> str:
    cubin = Path(library).with_suffix(".cubin")
    cubin.write_bytes(cuda_lab.device_code(library))
    return subprocess.run([_nvdisasm(), "-c", "-hex", cubin], check=True, capture_output=True, text=True).stdout


def _nvdisasm() -> str:
    import pytest

    installed = Path(sysconfig.get_path("purelib"), "nvidia", "cu13", "bin", "nvdisasm")
    found = shutil.which("nvdisasm") or (str(installed) if installed.exists() else None)
    return found or pytest.skip("nvdisasm is not installed")
