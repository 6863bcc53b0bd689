"""What a compiled program will take: memory on each device, and what devices send each other."""

import math
import re
from collections import Counter
from typing import Any, NamedTuple

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "reduce-scatter",
    "collective-permute",
    "collective-broadcast",
    "ragged-all-to-all",
)
OPERATION = re.compile(rf"= (?P<result>.*?) (?P<name>{'|'.join(COLLECTIVES)})(-start)?\(")
COMPUTATION = re.compile(r"^\s*(?:ENTRY )?%?(?P<name>[\w.\-]+) \(.*\) -> .* \{$")
CALL = re.compile(r"(?:body|to_apply|calls|computation)=%?([\w.\-]+)|branch_computations=\{(.*?)\}")
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2}
BYTES |= {"f32": 4, "s32": 4, "u32": 4, "f64": 8, "s64": 8, "u64": 8}


class Sent(NamedTuple):
    """One collective in a program: how often it runs, and its result on one device."""

    name: str
    times: int
    bytes: int  # of all arrays in the result
    elements: int  # of the largest


def collectives(hlo: str) -> list[Sent]:
    """Every collective in compiled HLO; those in a loop count as often as it turns."""
    inside: dict[str, list[tuple[str, int, int]]] = {}
    calls: dict[str, Counter[str]] = {}
    current, entry = "", ""
    for line in hlo.splitlines():
        if found := COMPUTATION.match(line):
            current = found["name"]
            entry = current if line.lstrip().startswith("ENTRY") else entry
            continue
        for body, branches in CALL.findall(line):
            trips = TRIPS.search(line)
            times = int(trips[1]) if trips and "body=" in line else 1
            for name in [body] if body else re.findall(r"[\w.\-]+", branches):
                calls.setdefault(current, Counter())[name] += times
        if found := OPERATION.search(line):
            arrays = ARRAY.findall(found["result"])
            sizes = [math.prod(int(n) for n in shape.split(",") if n) for _, shape in arrays]
            size = sum(n * BYTES.get(kind, 4) for n, (kind, _) in zip(sizes, arrays, strict=True))
            inside.setdefault(current, []).append((found["name"], size, max(sizes)))
    times = _times(entry, calls)
    return [
        Sent(name, times[computation], size, largest)
        for computation, found in inside.items()
        for name, size, largest in found
        if times[computation]
    ]


def memory(compiled: Any) -> dict[str, int]:
    """Bytes on each device: of the arguments, of what is alive beside them, and of both."""
    found = compiled.memory_analysis()
    arguments, temporaries = int(found.argument_size_in_bytes), int(found.temp_size_in_bytes)
    return {"arguments": arguments, "temporaries": temporaries, "total": arguments + temporaries}


def _times(entry: str, calls: dict[str, Counter[str]]) -> Counter[str]:
    """How often each computation runs when the entry runs once."""
    times: Counter[str] = Counter()

    def visit(name: str, factor: int) -> None:
        times[name] += factor
        for called, count in calls.get(name, {}).items():
            visit(called, factor * count)

    visit(entry, 1)
    return times
