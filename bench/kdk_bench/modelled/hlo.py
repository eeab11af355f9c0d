"""What an optimised program of XLA's TPU compiler costs: cycles by the compiler's own estimate, and bytes of HBM.

Both are summed by instruction, not by file of the profiler, in which identical fusions share one estimate. The cycles leave out
asynchronous copies, and take reading and writing HBM for overlapped: so the bytes are counted beside them. What takes a part of an
array, or puts a part into one in place, moves that part: alone or inside a fusion.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

SIZES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8}
SIZES |= {"f64": 8, "f8e4m3fn": 1, "f8e5m2": 1, "f8e4m3": 1, "f8e8m0fnu": 1}
_SHAPE = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\](\{[^}]*\})?")
_LINE = re.compile(r"\s*(?:ROOT )?%([\w.\-]+) = (.*?) ([\w\-]+)\((.*?)\)(?:,|$)")
_CYCLES = re.compile(r'"bundle_analysis_data":\{[^}]*?"estimated_cycles":"(\d+)"')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
FREE = {"parameter", "tuple", "get-tuple-element", "bitcast", "constant", "copy-done", "slice-done", "async-done", "after-all", "iota"}
TAKES = {"slice", "dynamic-slice", "gather"}  # a part of their first operand, as large as their result
UPDATE = "dynamic-update-slice"  # of its first operand, in place, by the second


@dataclass(frozen=True)
class Instruction:
    name: str
    result: str
    opcode: str
    operands: tuple[str, ...]
    line: str


@dataclass
class Cost:
    """cycles: None where no instruction has an estimate. caveats: what is not counted right, in words."""

    cycles: int | None = None
    hbm_bytes: int = 0
    caveats: list[str] = field(default_factory=list)

    def add(self, other: Cost, times: int = 1) -> None:
        if other.cycles is not None:
            self.cycles = (self.cycles or 0) + times * other.cycles
        self.hbm_bytes += times * other.hbm_bytes
        self.caveats += [c for c in other.caveats if c not in self.caveats]


def shapes_of(text: str) -> list[tuple[int, str]]:
    """(bytes, memory space) of every array in the text of a type. The space of HBM is "", of VMEM "1"."""
    found = []
    for dtype, dims, layout in _SHAPE.findall(text):
        if dtype not in SIZES:
            continue
        space = re.search(r"S\((\d+)\)", layout)
        size = math.prod(int(d) for d in dims.split(",") if d) * SIZES[dtype]
        found.append((size, space[1] if space else ""))
    return found


def in_hbm(text: str) -> int:
    """Bytes of the arrays of a type that lie in HBM."""
    return sum(size for size, space in shapes_of(text) if not space)


def computations(text: str) -> dict[str, list[Instruction]]:
    """The instructions of every computation; the entry's under ""."""
    found: dict[str, list[Instruction]] = {}
    current: list[Instruction] | None = None
    for line in text.splitlines():
        head = re.match(r"(ENTRY )?%([\w.\-]+) \(.*\{$", line)
        if head:
            current = found.setdefault("" if head[1] else head[2], [])
        elif line.startswith("}"):
            current = None
        elif current is not None and (m := _LINE.match(line)):
            current.append(Instruction(m[1], m[2], m[3], tuple(re.findall(r"%([\w.\-]+)", m[4])), line))
    return found


def cost(text: str, profile: Mapping[str, int] | None = None) -> Cost:
    """Of a whole program. profile: cycles by instruction from the profiler's files, for those whose line has none."""
    program = computations(text)
    if "" not in program:
        raise ValueError("the text has no entry computation")
    return _computation(program, "", profile or {})


def _computation(program: Mapping[str, list[Instruction]], name: str, profile: Mapping[str, int]) -> Cost:
    total = Cost()
    results = {i.name: i.result for i in program[name]}
    for instruction in program[name]:
        if instruction.opcode == "while":
            trips, caveat = _trips(program, instruction)
            total.add(_computation(program, _called(instruction, "body"), profile), trips)
            total.caveats += [caveat] if caveat else []
        elif instruction.opcode == "conditional":
            branches = [_computation(program, b, profile) for b in _branches(instruction) if b in program]
            total.add(max(branches, key=lambda c: (c.cycles or 0, c.hbm_bytes), default=Cost()))
            total.caveats.append(f"{instruction.name}: of the branches the dearest is counted")
        elif instruction.opcode == "call":
            total.add(_computation(program, _called(instruction, "to_apply"), profile))
        else:
            found = _CYCLES.search(instruction.line)
            cycles = int(found[1]) if found else profile.get(instruction.name)
            total.add(Cost(cycles, _bytes(instruction, results, program)))
    return total


def _called(instruction: Instruction, role: str) -> str:
    found = re.search(rf"\b{role}=%([\w.\-]+)", instruction.line)
    assert found is not None, instruction.line
    return found[1]


def _branches(instruction: Instruction) -> list[str]:
    listed = re.search(r"branch_computations=\{([^}]*)\}", instruction.line)
    text = listed[1] if listed else " ".join(re.findall(r"(?:true|false)_computation=%[\w.\-]+", instruction.line))
    return re.findall(r"%([\w.\-]+)", text)


def _trips(program: Mapping[str, list[Instruction]], loop: Instruction) -> tuple[int, str]:
    """How often a loop's body runs, and what to say where that is not known: the body counts once then."""
    said = _TRIPS.search(loop.line)
    if said:
        return int(said[1]), ""
    condition = program.get(_called(loop, "condition"), [])
    limits = [re.search(r"constant\((\d+)\)", i.line) for i in condition if i.opcode == "constant"]
    test = condition[-1] if condition else None
    if test is not None and test.opcode == "compare" and "direction=LT" in test.line and len(limits) == 1 and limits[0]:
        return int(limits[0][1]), f"{loop.name}: counted {limits[0][1]} times, the limit of its condition"
    return 1, f"{loop.name}: a loop of unknown length, its body counted once"


def _bytes(instruction: Instruction, results: Mapping[str, str], program: Mapping[str, list[Instruction]]) -> int:
    """HBM bytes of one instruction: its operands and results that lie there."""
    opcode, result = instruction.opcode, instruction.result
    if opcode in FREE:
        return 0
    if opcode in ("copy-start", "slice-start"):  # (destination, source, semaphore) and ((source), destination, semaphore)
        arrays = shapes_of(result)
        taken, space = arrays[0] if opcode == "copy-start" else arrays[1]
        source = arrays[1][1] if opcode == "copy-start" else arrays[0][1]
        return taken * ((not space) + (not source))
    operands = [results.get(operand, "") for operand in instruction.operands]
    if opcode in TAKES:
        return in_hbm(result) + min(in_hbm(operands[0]), _size(result)) + sum(map(in_hbm, operands[1:]))
    if opcode == UPDATE:
        return sum(map(in_hbm, operands[1:])) + min(in_hbm(result), _size(operands[1]))
    if opcode == "fusion" and (inside := program.get(_called(instruction, "calls"))):
        return _read(program, inside, operands) + _written(inside, result)
    return in_hbm(result) + sum(map(in_hbm, operands))


def _size(text: str) -> int:
    return sum(size for size, _ in shapes_of(text))


def _read(program: Mapping[str, list[Instruction]], inside: Sequence[Instruction], operands: Sequence[str]) -> int:
    """HBM bytes that a fusion reads: of an operand of which all that is inside takes parts, those."""
    total = 0
    for number, operand in enumerate(operands):
        whole = in_hbm(operand)
        total += min(whole, _taken(program, inside, _parameter(inside, number), whole)) if whole else 0
    return total


def _parameter(inside: Sequence[Instruction], number: int) -> str:
    return next((i.name for i in inside if f" parameter({number})" in i.line), "")


def _taken(program: Mapping[str, list[Instruction]], inside: Sequence[Instruction], name: str, whole: int) -> int:
    """Bytes of a value that its users take."""
    total = 0
    for user in inside:
        if name not in user.operands:
            continue
        alone = user.operands.count(name) == 1 and user.operands[0] == name
        if user.opcode in TAKES and alone:
            total += _size(user.result)
        elif user.opcode == "bitcast":
            total += _taken(program, inside, user.name, whole)
        elif user.opcode == "fusion" and (inner := program.get(_called(user, "calls"))):
            places = [number for number, operand in enumerate(user.operands) if operand == name]
            total += sum(_taken(program, inner, _parameter(inner, number), whole) for number in places)
        elif user.opcode != UPDATE or not alone:
            return whole
    return total


def _written(inside: Sequence[Instruction], result: str) -> int:
    """HBM bytes that a fusion writes: of a result that is an operand with a part of it put in, that part."""
    made = {instruction.name: instruction for instruction in inside}
    root = next((i for i in inside if i.line.lstrip().startswith("ROOT ")), None)
    roots = root.operands if root is not None and root.opcode == "tuple" else (root.name,) if root is not None else ()
    arrays = shapes_of(result)
    if len(roots) != len(arrays):
        return in_hbm(result)
    total = 0
    for (size, space), name in zip(arrays, roots):
        while made[name].opcode == "bitcast":
            name = made[name].operands[0]
        if made[name].opcode == UPDATE and _in_place(made, made[name].operands[0]):
            size = min(size, _size(made[made[name].operands[1]].result))
        total += 0 if space else size
    return total


def _in_place(made: Mapping[str, Instruction], name: str) -> bool:
    """Whether a value is not made here: an operand of the fusion, or memory with nothing in it."""
    while made[name].opcode == "bitcast":
        name = made[name].operands[0]
    return made[name].opcode == "parameter" or "AllocateBuffer" in made[name].line
