"""Who may import whom, import time, and that installing leaves no bare ``families`` behind."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TREES = {
    "turbospark_mlx": ROOT / "turbospark_mlx",
    "turbospark_mlx.families": ROOT / "families",
    "turbospark_mlx.custom_kernels": ROOT / "custom_kernels",
}
# Longest prefix wins. The table of docs/architecture.md.
ALLOWED = {
    "turbospark_mlx.protocols": [],
    "turbospark_mlx.errors": [],
    "turbospark_mlx.custom_kernels": ["turbospark_mlx.errors"],
    "turbospark_mlx.families": [
        "turbospark_mlx.custom_kernels",
        "turbospark_mlx.protocols",
        "turbospark_mlx.errors",
        "turbospark_mlx.cache",
    ],
    "turbospark_mlx.cache": ["turbospark_mlx.protocols", "turbospark_mlx.errors"],
    "turbospark_mlx.gturbo": ["turbospark_mlx.protocols", "turbospark_mlx.errors"],
}


def _modules() -> dict[str, Path]:
    found = {}
    for package, folder in TREES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join([package, *(p for p in parts if p != "__init__")])] = path
    return found


MODULES = _modules()


def _imports(name: str, path: Path, *, top_level_only: bool) -> set[str]:
    """Our own modules that ``name`` imports, absolute and relative, as full names."""
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level_only else ast.walk(tree)
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    result = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            result |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                anchor = package.split(".")
                anchor = anchor[: len(anchor) - node.level + 1]
                base = ".".join([*anchor, *([base] if base else [])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                result.add(full if full in MODULES else base)
    return {i for i in result if i in MODULES}


def _under(module: str, prefixes) -> bool:
    return any(module == p or module.startswith(p + ".") for p in prefixes)


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports_only_what_its_package_may(name):
    imports = _imports(name, MODULES[name], top_level_only=False)
    rules = [prefix for prefix in ALLOWED if _under(name, [prefix])]
    if rules:
        own = max(rules, key=len)
        wrong = {i for i in imports if not _under(i, [own, *ALLOWED[own]])}
    elif _under(name, ["turbospark_mlx.cli", "turbospark_mlx.__main__"]):
        wrong = set()
    else:
        wrong = {i for i in imports if _under(i, ["turbospark_mlx.cli"])}
    assert not wrong, f"{name} may not import {sorted(wrong)}; see docs/architecture.md"


def test_the_format_package_does_not_need_mlx():
    for name, path in MODULES.items():
        if _under(name, ["turbospark_mlx.gturbo"]):
            for node in ast.walk(ast.parse(path.read_text())):
                names = (
                    [a.name for a in node.names]
                    if isinstance(node, ast.Import)
                    else [node.module or ""]
                    if isinstance(node, ast.ImportFrom)
                    else []
                )
                assert not any(n.split(".")[0] == "mlx" for n in names), name


def test_there_is_no_import_cycle():
    graph = {name: _imports(name, path, top_level_only=True) for name, path in MODULES.items()}
    done, active = set(), []

    def visit(name):
        if name in active:
            raise AssertionError("import cycle: " + " -> ".join([*active[active.index(name) :], name]))
        if name in done:
            return
        active.append(name)
        for other in sorted(graph[name] - {name}):
            visit(other)
        active.pop()
        done.add(name)

    for name in graph:
        visit(name)


def test_every_package_folder_and_data_file_is_listed_in_pyproject():
    import tomllib

    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    present = {name for name, path in MODULES.items() if path.name == "__init__.py"}
    shipped = set()
    for package, folder in TREES.items():
        for path in folder.rglob("*"):
            if path.is_dir() or path.suffix in (".py", ".pyc"):
                continue
            holder = ".".join([package, *path.parent.relative_to(folder).parts])
            assert any(path.match(glob) for glob in setuptools["package-data"].get(holder, ())), (
                f"{path} is not shipped"
            )
            shipped.add(holder)
    assert set(setuptools["packages"]) == present | shipped


def _fresh_python(code: str) -> str:
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    return run.stdout.strip()


def test_importing_the_package_is_quick_and_loads_no_mlx():
    code = (
        "import sys, time; t = time.perf_counter(); import turbospark_mlx; t = time.perf_counter() - t;"
        "print(t, any(m.split('.')[0] in ('mlx', 'numpy', 'tokenizers') for m in sys.modules))"
    )
    seconds, heavy = _fresh_python(code).split()
    assert float(seconds) < 0.5
    assert heavy == "False"


def test_command_line_help_loads_no_mlx():
    code = (
        "import sys, contextlib, io\n"
        "from turbospark_mlx.cli import main\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit): main(['--help'])\n"
        "print(sorted(m for m in sys.modules if m.split('.')[0] in ('mlx', 'tokenizers', 'huggingface_hub')))"
    )
    assert _fresh_python(code) == "[]"


def test_families_and_kernels_install_inside_the_package():
    code = (
        "import turbospark_mlx.families, turbospark_mlx.custom_kernels, importlib.util as u;"
        "print(u.find_spec('families'), u.find_spec('custom_kernels'))"
    )
    assert _fresh_python(code) == "None None"


def test_every_export_exists():
    import turbospark_mlx

    for name in turbospark_mlx.__all__:
        assert getattr(turbospark_mlx, name) is not None
