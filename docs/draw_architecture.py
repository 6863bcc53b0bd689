"""Draws docs/figures/architecture.svg and the module table of docs/architecture.md from the source.

python docs/draw_architecture.py
"""

import ast
from pathlib import Path

DOCS = Path(__file__).resolve().parent
SOURCE = DOCS.parent / "src" / "celo2"
PAGE, FIGURE = DOCS / "architecture.md", DOCS / "figures" / "architecture.svg"
BEGIN, END = "<!-- modules -->", "<!-- end -->"
# From the bottom up: an arrow of imports points to a row further down.
ROWS = (
    ("rule",),
    ("velo", "routing"),
    ("rulefile",),
    ("published", "jax", "torch"),
    ("tasks", "baselines", "runs"),
    ("metatrain",),
    ("evaluate",),
    ("commands",),
    ("cli",),
)


def part_of(path: Path) -> str:
    """The package or single module that a file belongs to."""
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def imports_of(path: Path) -> set[str]:
    """The parts of celo2 that a file imports, lazily or not."""
    names = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.append(node.module)
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    parts = {name.split(".")[1] for name in names if name.startswith("celo2.")}
    return parts & {part for row in ROWS for part in row}


def edges() -> set[tuple[str, str]]:
    """Which part imports which."""
    found = {(part_of(path), part) for path in SOURCE.rglob("*.py") for part in imports_of(path)}
    return {(a, b) for a, b in found if a != b and a != "__init__"}


def module_table() -> str:
    """One line for each module: its path, its length and the first line of its docstring."""
    lines = ["| module | lines | what it is |", "|---|---|---|"]
    for path in sorted(
        SOURCE.rglob("*.py"), key=lambda p: (len(p.parts) > len(SOURCE.parts) + 1, p)
    ):
        text = path.read_text("utf-8")
        docstring = (ast.get_docstring(ast.parse(text)) or "").split("\n")[0]
        name = path.relative_to(SOURCE).as_posix()
        lines.append(f"| [{name}](../src/celo2/{name}) | {len(text.splitlines())} | {docstring} |")
    return "\n".join(lines)


def with_table(page: str) -> str:
    """The page with the table of today's source."""
    head, rest = page.split(BEGIN)
    return f"{head}{BEGIN}\n{module_table()}\n{END}{rest.split(END)[1]}"


def draw() -> None:
    """Boxes in rows, an arrow for every import between them."""
    import matplotlib

    matplotlib.rcParams["svg.hashsalt"] = "celo2"  # the same file for the same source
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6.5))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.axis("off")
    axes.set(xlim=(0, 1), ylim=(-0.6, len(ROWS) - 0.4))
    places = {
        part: ((i + 1) / (len(row) + 1), y)
        for y, row in enumerate(ROWS)
        for i, part in enumerate(row)
    }
    arrow = {"arrowstyle": "-|>", "color": "#8c959f", "shrinkA": 14, "shrinkB": 16, "lw": 0.9}
    for a, b in sorted(edges()):
        bend = {"connectionstyle": f"arc3,rad={0.12 if places[a][0] < 0.5 else -0.12}"}
        axes.annotate("", places[b], places[a], arrowprops=arrow | bend)
    for part, (x, y) in places.items():
        files = list((SOURCE / part).glob("*.py"))
        label = f"{part}/\n{len(files)} files" if files else f"{part}.py"
        box = {"boxstyle": "round,pad=0.45", "facecolor": "#ddf4ff", "edgecolor": "#0969da"}
        axes.text(x, y, label, ha="center", va="center", fontsize=10, bbox=box)
    FigureCanvasSVG(figure).print_svg(FIGURE, metadata={"Date": None})


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text("utf-8")), "utf-8")
    draw()
    print(PAGE, FIGURE, sep="\n")
