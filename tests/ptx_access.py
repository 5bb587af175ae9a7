"""Which instruction touches which part of a mailbox: pointers followed through a kernel's PTX.

Every register is given the pointers that it may hold: a kernel parameter plus a constant, whatever is added to it at
run time. The constants are MailboxLayout's offsets, so they tell slots from results. Functions that a kernel calls are
followed, too: a function's parameter may hold what any call gives it. PTX isn't parsed in full, so this is no proof;
the tests require each kind of access to be found.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from cuda.bindings import nvrtc

# A value is {(pointer or None, constant)}; None is a plain number. Loops may add for ever: the first few will do.
Values = frozenset[tuple[str | None, int]]
MAX_VALUES = 4
NUMBER: Values = frozenset({(None, 0)})
PARAMETER = "parameter"  # the address of a kernel parameter itself

ORDER = "order"
ORDERING = ("fence.acq_rel", "bar.sync", "cp.async.bulk.wait_group")

COPIES = ("mov", "cvt", "cvta")
SUMS = ("add", "sub", "or")
PRODUCTS = ("mul", "shl", "mad")


@dataclass(frozen=True)
class Access:
    """A load, store or atomic: its opcode, and the pointer and constant that its address is made of. Or what orders
    those: a fence, a barrier, a wait for bulk copies; its pointer is ORDER."""

    opcode: str
    pointer: str
    offset: int


def compile_to_ptx(folder: Path, source_name: str, macros: Mapping[str, int | str]) -> str:
    """PTX of a source in `folder`, without the cubin, which takes most of a compilation's time."""
    options = [f"-I{folder}", "--std=c++17", "--gpu-architecture=compute_90a", "--fmad=false"]
    options += [f"-D{name}={value}" for name, value in macros.items()]
    encoded = [option.encode() for option in options]
    source = (folder / source_name).read_text().encode()
    _, program = nvrtc.nvrtcCreateProgram(source, source_name.encode(), 0, [], [])
    (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = bytearray(nvrtc.nvrtcGetProgramLogSize(program)[1])
        nvrtc.nvrtcGetProgramLog(program, log)
        raise AssertionError(f"{source_name} doesn't compile:\n{log.decode(errors='replace')}")
    ptx = bytearray(nvrtc.nvrtcGetPTXSize(program)[1])
    nvrtc.nvrtcGetPTX(program, ptx)
    nvrtc.nvrtcDestroyProgram(program)
    return ptx.rstrip(b"\0").decode()


def accesses(ptx: str, entry: str, pointers: Mapping[int, str]) -> list[Access]:
    """Accesses through pointers that the kernel was given, in the order of the text; a function's where it is called.

    pointers: byte offset in the kernel's parameters -> the name of the pointer there. Separate parameters are taken to
    follow each other as in a struct.
    """
    texts, symbols = _bodies(ptx, entry)
    bodies = {name: _statements(text) for name, text in texts.items()}
    values: dict[str, Values] = {name: frozenset({(PARAMETER, offset)}) for name, offset in symbols.items()}
    changed = True
    while changed:
        changed = False
        for opcode, operands in itertools.chain.from_iterable(bodies.values()):
            for register, value in _results(opcode, operands, values, pointers):
                known = values.get(register, frozenset())
                if not value <= known and len(known) < MAX_VALUES:
                    values[register] = known | value
                    changed = True
    found = []
    for opcode, operands in _executed(bodies, entry):
        if opcode.startswith(ORDERING):
            found.append(Access(opcode, ORDER, 0))
        elif opcode.split(".")[0] in ("ld", "st", "atom", "red", "cp", "multimem"):
            for address in re.findall(r"\[([^\]]+)\]", operands):
                named = {pair for pair in _evaluate(address, values) if pair[0] not in (None, PARAMETER)}
                found += [Access(_spelt(opcode), str(pointer), offset) for pointer, offset in sorted(named)]
    return found


def _spelt(opcode: str) -> str:
    """In one way: whether a state space is named depends on what the compiler knows of a pointer, in functions less."""
    return re.sub(r"^(ld|st)\.([bfsu]\d+)$", r"\1.global.\2", opcode.replace("atom.global.", "atom."))


def _executed(bodies: Mapping[str, list[tuple[str, str]]], name: str) -> Iterator[tuple[str, str]]:
    for opcode, operands in bodies[name]:
        yield opcode, operands
        if opcode == "call":
            yield from _executed(bodies, operands)


def _bodies(ptx: str, entry: str) -> tuple[dict[str, str], dict[str, int]]:
    """Of an entry and of all functions; and the offsets of the entry's parameters."""
    match = re.search(rf"\.entry {entry}\((.*?)\)(.*?)(\.entry|\.func|\Z)", ptx, re.DOTALL)
    assert match is not None, f"no entry {entry}"
    symbols, offset = {}, 0
    for declaration in match[1].split(","):
        size = {"u64": 8, "b64": 8, "u32": 4, "b32": 4}
        kind = re.search(r"\.param (?:\.align (\d+) )?\.(\w+)", declaration)
        name = re.search(rf"({entry}_param_\d+)(?:\[(\d+)\])?", declaration)
        if kind is None or name is None:
            continue
        num_bytes = int(name[2]) if name[2] else size[kind[2]]
        alignment = int(kind[1]) if kind[1] else num_bytes
        offset = -(-offset // alignment) * alignment
        symbols[name[1]] = offset
        offset += num_bytes
    return _with_functions(entry, match[2], ptx), symbols


def _statements(body: str) -> list[tuple[str, str]]:
    """(opcode, operands) of each."""
    statements = []
    for statement in re.split(r"[;\n]", re.sub(r"//[^\n]*", "", body)):
        text = re.sub(r"^\s*(\{|\})?\s*(@!?%?\w+)?\s*", "", statement).strip()
        if text and not text.startswith((".", "$")):
            opcode, _, operands = text.partition(" ") if " " in text else text.partition("\t")
            statements.append((opcode, operands.strip()))
    return statements


def _with_functions(entry: str, body: str, ptx: str) -> dict[str, str]:
    """The body and those of all functions: registers get names of their own, the parameters of calls the function's."""
    definitions = re.findall(r"\.func\s+(?:\([^)]*\)\s*)?(\w+)\([^;{]*\)\s*(\{.*?\n\})", ptx, re.DOTALL)
    bodies = {entry: body}
    for number, (name, text) in enumerate(definitions):
        bodies[name] = re.sub(r"%(\w+)", rf"%\1_of_{number}", text)

    def named(call: re.Match[str]) -> str:
        """Its statement on one line: `call callee`."""
        ((statement, callee),) = re.findall(r"(call(?:\.uni)?\s+(?:\([^)]*\)\s*,\s*)?(\w+).*?;)", call[0], re.DOTALL)
        return re.sub(r"\[param(\d+)", rf"[{callee}_param_\1", call[0].replace(statement, f"call {callee};"))

    return {
        name: re.sub(r"\{ // callseq.*?\} // callseq", named, text, flags=re.DOTALL) for name, text in bodies.items()
    }


def _cell(address: str) -> str:
    """Of a parameter of a function that is called: `name+offset`, in one spelling."""
    base, _, added = address.strip("[] ").partition("+")
    return f"{base}+{int(added or 0)}"


def _evaluate(expression: str, values: Mapping[str, Values]) -> Values:
    """Of an operand: a register, a number, a symbol, or an address `register+constant`."""
    match = re.fullmatch(r"(\S+?)(?:\+(-?\d+))?", expression.strip("[] "))
    base, added = (match[1], int(match[2] or 0)) if match else ("", 0)
    if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?", base):
        return frozenset({(None, int(base.rstrip("U"), 0))})
    return frozenset((pointer, number + added) for pointer, number in values.get(base, NUMBER))


def _results(
    opcode: str, operands: str, values: Mapping[str, Values], pointers: Mapping[int, str]
) -> list[tuple[str, Values]]:
    """What a statement writes to which registers."""
    kind = opcode.split(".")[0]
    parts = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", operands)
    if kind == "st" and ".param" in opcode:
        return [(_cell(parts[0]), _evaluate(parts[1], values))]
    if kind in ("st", "red", "bra", "bar", "ret", "fence", "membar") or len(parts) < 2:
        return []
    registers = re.findall(r"%\w+", parts[0])
    if kind == "ld" and len(registers) == 1:
        address = _evaluate(parts[1], values)
        named = {pointers[at] for what, at in address if what == PARAMETER and at in pointers}
        given = values.get(_cell(parts[1]), NUMBER) if ".param" in opcode else NUMBER
        return [(registers[0], frozenset((name, 0) for name in named) or given)]
    if len(registers) != 1 or "{" in operands:
        return [(register, NUMBER) for register in registers]
    sources = [_evaluate(part, values) for part in parts[1:]]
    return [(registers[0], _computed(kind, sources))]


def _computed(kind: str, sources: list[Values]) -> Values:
    if kind in COPIES:
        return sources[0]
    if kind == "selp":
        return sources[0] | sources[1]
    if kind in SUMS:
        return _sums(sources[0], sources[1], -1 if kind == "sub" else 1)
    if kind in PRODUCTS:
        shifted = frozenset((None, 1 << amount) for _, amount in sources[1] if 0 <= amount < 64)
        factors = shifted if kind == "shl" else sources[1]
        product = frozenset((None, a * b) for _, a in sources[0] for _, b in factors)
        return _sums(product, sources[2], 1) if kind == "mad" else product
    return NUMBER


def _sums(left: Values, right: Values, sign: int) -> Values:
    # Of two values at most one is a pointer; `or` is how a sum of disjoint bits is written. A number below 0 is an
    # index known at run time less a constant, so not below 0 in all.
    total = {(p or q, a + sign * b) for p, a in left for q, b in right}
    return frozenset((pointer, number if pointer else max(number, 0)) for pointer, number in total)
