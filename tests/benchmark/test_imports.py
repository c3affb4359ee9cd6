"""Which files a script imports: `seeds` compares them."""

import hashlib
from pathlib import Path

from benchmark.lab.imports import edited, local_modules

FILES = {
    "script.py": "import numpy, other\nfrom here.deep import a\ndef f(): import late",
    "other.py": "def broken(:",
    "late.py": "import script",
    "here/deep/a.py": "from . import b\nfrom ..near import c as d, e",
    "here/deep/b.py": "spec = {'entry_point': 'registered.envs:Arm'}",
    "here/near.py": "",
    "registered/__init__.py": "",
    "registered/envs.py": "text = 'see nothing: Arm'",
    "users/arm.py": "from hand import *",
    "users/hand.py": "",
    "nothing.py": "",
    "site-packages/installed.py": "",
}


def test_files_are_found_through_packages_relative_names_entry_points_and_the_command_line():
    for name, text in FILES.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    places = [str(Path(x).absolute()) for x in (".", "users", "site-packages")]
    script = Path("script.py").absolute()
    found = local_modules(script, ["arm", "installed", "cuda"], places)
    names = {str(path.relative_to(Path().absolute())) for path in found}
    assert names == FILES.keys() - {"script.py", "nothing.py", "site-packages/installed.py"}
    assert (
        found[Path("users/arm.py").absolute()] == hashlib.sha256(b"from hand import *").hexdigest()
    )
    assert edited(found) == ""
    Path("here/near.py").write_text("x = 1")
    assert edited(found) == "near.py"
    Path("here/near.py").unlink()
    assert edited(found) == "near.py"
