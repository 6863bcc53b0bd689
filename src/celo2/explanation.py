"""A table of who updates what, and why."""

from typing import NamedTuple

from celo2.layout import MatrixView


class Line(NamedTuple):
    """One tensor of the table."""

    path: str
    shape: tuple[int, ...]
    updater: str
    reason: str
    view: MatrixView
    viewed: tuple[int, ...]
    size: int


class Explanation(list[Line]):
    """The lines of the table, which `print` shows aligned with each tensor's share."""

    def share(self, updater: str) -> float:
        """The part of all parameters that `updater` ("rule" or "adam") takes."""
        total = sum(line.size for line in self)
        return sum(line.size for line in self if line.updater == updater) / max(total, 1)

    def __str__(self) -> str:
        total = sum(line.size for line in self)
        rows = [("path", "shape", "updated by", "because", "seen as", "share")]
        for line in self:
            name = "celo2" if line.updater == "rule" else "AdamW"
            seen = _times(line.viewed) if line.updater == "rule" else "-"
            share = f"{line.size / max(total, 1):.1%}"
            rows.append((line.path, _times(line.shape), name, line.reason, seen, share))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        table = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        table.insert(1, "  ".join("-" * width for width in widths))
        table.append(f"celo2 updates {self.share('rule'):.1%} of {total:,} parameters.")
        return "\n".join(table)


def _times(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "scalar"
