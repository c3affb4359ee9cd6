"""What a script imports: its own files, of which runs are to have one version."""

import ast
import importlib.machinery
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmark.lab.provenance import hash_of

ENTRY = re.compile(r"(\w+(?:\.\w+)*):\w+")  # a module and what is in it, as Gymnasium writes it


def local_modules(script: Path, names: Iterable[str], folders: Iterable[str]) -> dict[Path, str]:
    """Hashes of the files that a script imports, directly or not, without installed packages.

    Args:
        names: of modules that its command line names.
        folders: where it finds modules, apart from those of this Python.
    """
    places = [*folders, *sys.path]
    waiting = [script, *(file for name in names for file in files_of(name, places))]
    found: dict[Path, str] = {}
    while waiting:
        path = waiting.pop()
        if path not in found and not is_installed(path):
            found[path] = hash_of(path)
            for name, folder in imports_of(path):
                waiting += files_of(name, [folder] if folder else places)
    del found[script]
    return dict(sorted(found.items()))


def is_installed(path: Path) -> bool:
    """Whether a module is of Python's library or of an installed package."""
    library = Path(sysconfig.get_path("stdlib"))
    return path.is_relative_to(library) or bool({"site-packages", "dist-packages"} & {*path.parts})


def imports_of(path: Path) -> Iterator[tuple[str, str]]:
    """Names of modules that a file imports anywhere; of a relative one, the folder that it is in.

    A text such as "module:Class" counts too: by that, Gymnasium finds an environment.
    """
    try:
        tree = ast.parse(path.read_bytes() if path.suffix == ".py" else b"")
    except (SyntaxError, ValueError):  # it cannot be imported either
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((x.name, "") for x in node.names)
        elif isinstance(node, ast.ImportFrom):
            folder = str(path.parents[node.level - 1]) if node.level else ""
            for x in node.names:  # each may be a module
                yield ".".join(filter(None, (node.module, x.name))), folder
        elif isinstance(node, ast.Constant) and (entry := ENTRY.fullmatch(str(node.value))):
            yield entry[1], ""


def files_of(name: str, places: list[str]) -> list[Path]:
    """The files that run when a module is imported: its packages' and its own, if they exist."""
    files = []
    for part in name.split("."):
        spec = importlib.machinery.PathFinder.find_spec(part, places)
        if spec and spec.has_location:
            files.append(Path(spec.origin))
        places = list(spec.submodule_search_locations or ()) if spec else []
        if not places:  # else `sys.path` would be searched
            break
    return files


def edited(hashes: dict[Path, str]) -> str:
    """The name of the first of some files that is not as it was; empty if all are."""
    return next((x.name for x, y in hashes.items() if not x.exists() or hash_of(x) != y), "")
