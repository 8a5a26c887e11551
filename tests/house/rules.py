"""The house rules as functions over text: each takes source and returns the faults it finds, as ``line: what``."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 120

FLOOR = {"errors", "registry", "settings", "contracts", "records", "report", "native_build", "whole_file"}
# Which parts a part may import; a part is the first name below `depthfx`, and the floor counts as one.
MAY_IMPORT = {
    "floor": {"floor"},
    "alloc": {"floor", "alloc"},
    "lowering": {"floor", "lowering"},
    "passes": {"floor", "lowering", "passes"},
    "skippers": {"floor", "lowering", "skippers"},
    "runtime": {"floor", "alloc", "lowering", "runtime"},
    "smollm2": {"floor"},
    "api": {"floor", "alloc", "lowering", "passes", "skippers", "runtime", "package"},
    "server": {"floor", "api", "package", "server"},
    "memory_picture": {"floor"},
    "demo_burst": {"floor", "cli", "memory_picture", "smollm2", "package"},
    "demo": {"floor", "api", "cli", "demo_burst", "smollm2", "package"},
    "cli": {"floor", "lowering", "skippers", "api", "server", "demo", "smollm2", "package"},
    "__main__": {"cli"},
    "package": {"floor", "alloc", "api", "lowering"},
}
# Where a heavy or special dependency may be imported at all.
ONLY_IN = {
    "triton": ("depthfx/lowering/kernel_spec.py", "depthfx/lowering/kernels/", "depthfx/lowering/precompile"),
    "transformers": (
        "depthfx/runtime/generation.py",
        "depthfx/runtime/hf_params.py",
        "depthfx/runtime/lockstep.py",
        "depthfx/runtime/model.py",
        "depthfx/passes/capture.py",
        "depthfx/lowering/load_model.py",
        "depthfx/api.py",
        "depthfx/smollm2.py",
        "depthfx/cli.py",
    ),
}
# Functions that a contract defines and documents once, by the folder of the plug-ins that implement them.
CONTRACTS = {
    "depthfx/lowering/kernels/": {"launch", "reference", "fake", "cases", "make_cases", "tolerance"},
    "depthfx/lowering/formats/": {"covers", "split", "join", "fast_values"},
    "depthfx/alloc/physical/": {"unavailable"},
}
PLUGIN_FOLDERS = (
    "depthfx/lowering/kernels/",
    "depthfx/lowering/formats/",
    "depthfx/alloc/physical/",
    "depthfx/skippers/policies/",
    "depthfx/skippers/projectors/",
)


def part_of(path: str) -> str:
    """``depthfx/alloc/units.py`` -> ``alloc``; a floor file -> ``floor``; ``depthfx/__init__.py`` -> ``package``."""
    name = path.removeprefix("depthfx/").split("/")[0].removesuffix(".py")
    return "floor" if name in FLOOR else "package" if name == "__init__" else name


def _type_only(tree: ast.AST) -> set[int]:
    """Lines below ``if TYPE_CHECKING:``."""
    blocks = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test).endswith("TYPE_CHECKING")]
    return {inner.lineno for block in blocks for statement in block.body for inner in ast.walk(statement) if hasattr(inner, "lineno")}


def imports(path: str, source: str) -> Iterator[tuple[int, str]]:
    """All absolute dotted names that a file imports, at any depth and under TYPE_CHECKING too."""
    package = path.removesuffix("/__init__.py").split("/") if path.endswith("/__init__.py") else path.split("/")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{stem}.{alias.name}") for alias in node.names)


def check_layering(path: str, source: str) -> list[str]:
    """Imports between parts go one way, for types too; special dependencies are executed only where they belong."""
    faults = []
    type_only = _type_only(ast.parse(source))
    part = part_of(path)
    for line, name in imports(path, source):
        top = name.split(".")[0]
        if top == "depthfx":
            rest = name.split(".")[1:]
            target = part_of(f"depthfx/{rest[0]}.py") if rest else "package"
            if target not in MAY_IMPORT and target not in FLOOR:
                target = "package"  # `from depthfx import compile`
            if part not in MAY_IMPORT:
                faults.append(f"{line}: the part {part} has no place in the house; add it to MAY_IMPORT with its neighbours")
            elif target not in MAY_IMPORT[part]:
                faults.append(f"{line}: {part} must not import {target} ({name})")
        if top in ONLY_IN and not path.startswith(ONLY_IN[top]) and line not in type_only:
            faults.append(f"{line}: {top} is imported only in {', '.join(ONLY_IN[top])}")
    return faults


def check_sizes(path: str, source: str) -> list[str]:
    """Files and functions stay short; a Triton kernel and what launches it may be longer."""
    faults = []
    count = len(source.splitlines())
    if count > MAX_FILE_LINES:
        faults.append(f"1: {count} lines; at most {MAX_FILE_LINES}")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = node.end_lineno - node.lineno + 1
            limit = MAX_KERNEL_LINES if any("jit" in ast.unparse(d) for d in node.decorator_list) else MAX_FUNCTION_LINES
            if length > limit:
                faults.append(f"{node.lineno}: {node.name} has {length} lines; at most {limit}")
    return faults


def check_docstrings(path: str, source: str) -> list[str]:
    """Every module, public class and public function at module or class level says what it does.

    Exempt are methods of up to four lines, whose name is the whole story, and in a kernel file the functions that
    KernelSpec defines (`launch`, `reference`, ...), which the formula in the module's docstring explains.
    """
    tree = ast.parse(source)
    faults = [] if ast.get_docstring(tree) else ["1: the module has no docstring"]
    scopes: list[ast.AST] = [tree, *(n for n in tree.body if isinstance(n, ast.ClassDef) and not n.name.startswith("_"))]
    for scope in scopes:
        for node in scope.body:
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) or node.name.startswith("_"):
                continue
            short = not isinstance(node, ast.ClassDef) and scope is not tree and node.end_lineno - node.lineno < 4
            overload = any("overload" in ast.unparse(d) or "setter" in ast.unparse(d) for d in node.decorator_list)
            contract = any(path.startswith(folder) and node.name in names for folder, names in CONTRACTS.items())
            if not ast.get_docstring(node) and not (short or overload or contract):
                faults.append(f"{node.lineno}: {node.name} has no docstring")
    return faults


def check_excepts(path: str, source: str) -> list[str]:
    """An except clause names what it expects; cleaning up on BaseException is allowed where it raises again."""
    faults = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ExceptHandler):
            if node.type is not None and ast.unparse(node.type) == "BaseException":
                if any(isinstance(n, ast.Raise) and n.exc is None for n in ast.walk(node)):
                    continue
            names = [ast.unparse(t) for t in (node.type.elts if isinstance(node.type, ast.Tuple) else [node.type])] if node.type else [""]
            faults += [
                f"{node.lineno}: except {n or '(bare)'} catches everything" for n in names if n in ("", "Exception", "BaseException")
            ]
    return faults


def check_environment(path: str, source: str) -> list[str]:
    """The environment is read in settings.py alone."""
    if path == "depthfx/settings.py":
        return []
    faults = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv") and ast.unparse(node.value) == "os":
            faults.append(f"{node.lineno}: os.{node.attr} belongs to settings.py")
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            faults += [f"{node.lineno}: os.{a.name} belongs to settings.py" for a in node.names if a.name in ("environ", "getenv")]
    return faults


# Files whose code runs in every step: what they send to the device goes by `HostRing` alone.
STEP_FILES = tuple(
    f"depthfx/runtime/{name}.py" for name in ("chunks", "elastic", "graphs", "precision", "runner", "sampler", "scheduler", "staging")
)


def check_uploads(path: str, source: str) -> list[str]:
    """A step copies nothing to the device by the copy engine, which a restore keeps to itself for as long as it takes."""
    if path not in STEP_FILES:
        return []
    calls = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
    moves = [n for n in calls if n.func.attr in ("cuda", "pin_memory") or (n.func.attr == "to" and "device" in ast.unparse(n))]
    return [f"{n.lineno}: {ast.unparse(n)} waits behind a restore; send it by HostRing" for n in moves]


def check_registers(path: str, source: str, imported: frozenset[str] = frozenset()) -> list[str]:
    """A plug-in file calls ``register_...`` or ``REGISTRY.add`` when it is imported.

    Files with a leading underscore only help, and so do files that a neighbour imports (``imported``, dotted names).
    """
    name = path.rsplit("/", 1)[-1]
    if not path.startswith(PLUGIN_FOLDERS) or name.startswith("_") or path.removesuffix(".py").replace("/", ".") in imported:
        return []
    for statement in ast.parse(source).body:
        calls = [n for n in ast.walk(statement) if isinstance(n, ast.Call)] if isinstance(statement, (ast.Expr, ast.Assign)) else []
        calls += [d for d in getattr(statement, "decorator_list", []) if isinstance(d, (ast.Call, ast.Name))]
        for call in calls:
            target = ast.unparse(call.func if isinstance(call, ast.Call) else call)
            if target.split(".")[-1].startswith("register") or re.fullmatch(r"(\w+\.)*[A-Z_]+\.add", target):
                return []
    return ["1: the file registers nothing; call register_... at module level"]


def check_asserts(path: str, source: str) -> list[str]:
    """Every test can fail: it asserts, expects an exception, or calls a helper that does."""
    tree = ast.parse(source)
    functions = {n.name: n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))}

    def can_fail(node: ast.AST, seen: frozenset[str]) -> bool:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Assert):
                return True
            if isinstance(inner, ast.Call):
                called = ast.unparse(inner.func).split(".")[-1]
                if called in ("raises", "warns", "fail", "opcheck") or called.lstrip("_").startswith(("assert", "check", "expect")):
                    return True
                if called in functions and called not in seen and can_fail(functions[called], seen | {called}):
                    return True
        return False

    tests = [n for n in functions.values() if n.name.startswith("test")]
    faults = [f"{n.lineno}: {n.name} asserts nothing" for n in tests if not can_fail(n, frozenset({n.name}))]
    return faults if tests else ["1: the file holds no test"]


# Spelled in parts, so that this file passes its own check.
_FORBIDDEN = [
    r"(?<![\w.])/(?:wo" + r"rk|op" + r"t|ro" + r"ot|ho" + r"me)/[\w.-]+",
    r"(?:py" + r"pi|npm" + r"js|conda|anaconda)\.(?:org|com|io)",
    r"files\.python" + r"hosted",
    r"download\.py" + r"torch",
    r"deb" + r"ian\.org",
]


def check_places(path: str, text: str) -> list[str]:
    """No registry host and no path of one machine in a tracked file."""
    return [f"{i}: {m.group()}" for i, line in enumerate(text.splitlines(), 1) for p in _FORBIDDEN for m in re.finditer(p, line)]


def fenced(text: str, language: str) -> list[str]:
    """Bodies of the fenced blocks of one language in a Markdown text."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def unknown_commands(text: str, targets: set[str], commands: set[str]) -> list[str]:
    """Commands that a Markdown text shows (in backticks or shell blocks) and that the Makefile or the command line lacks."""
    shown = re.findall(r"`([^`\n]+)`", text) + [line for block in fenced(text, "(?:sh|bash|console)") for line in block.splitlines()]
    faults = []
    for line in shown:
        if match := re.match(r"\s*\$?\s*make ([a-z][\w-]*)", line):
            faults += [] if match.group(1) in targets else [line.strip()]
        elif match := re.match(r"\s*\$?\s*(?:python3? -m )?depthfx ([a-z][\w-]*)", line):
            faults += [] if match.group(1) in commands else [line.strip()]
    return faults
