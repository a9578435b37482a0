"""Build the sdist, a wheel from that sdist, install the wheel alone and use it.

Needs `build` (in the extra `test`); build tools are fetched by pip as for any installation.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
USE = """
import importlib.metadata, importlib.util, pathlib, sys
import torch, flexmod
folder = pathlib.Path(flexmod.__file__).parent
assert folder.parent == pathlib.Path(sys.argv[1]), folder
assert (folder / "py.typed").exists()
assert importlib.metadata.version("flexmod") == flexmod.__version__
query = torch.randn(1, 2, 40, 16)
call = query, query, query, flexmod.mods.softcap(2.0), flexmod.masks.causal()
expected = flexmod.flex_attention(*call, backend="reference")
engines = ["cpu"] + ["fa2"] * (importlib.util.find_spec("triton") is not None)
for engine in engines:  # fa2 reads the templates that the wheel carries
    torch.testing.assert_close(flexmod.flex_attention(*call, backend=engine), expected)
print(f"flexmod {flexmod.__version__} from its wheel:", *engines)
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        run("-m", "build", "--outdir", str(place / "dist"), str(ROOT))
        (wheel,) = (place / "dist").glob("*.whl")
        assert len(list((place / "dist").glob("*.tar.gz"))) == 1
        check_contents(wheel)
        target = place / "installed"
        run("-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(wheel))
        environment = {
            **os.environ,
            "PYTHONPATH": str(target),
            "TRITON_INTERPRET": "1",
            "FLEXMOD_CACHE_DIR": str(place / "cache"),
        }
        run("-c", USE, str(target), cwd=place, env=environment)


def check_contents(wheel: Path) -> None:
    """The package with its data, the templates, and nothing else."""
    names = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    package = (p for p in (ROOT / "flexmod").rglob("*") if p.is_file() and p.suffix != ".pyc")
    wanted = {p.relative_to(ROOT).as_posix() for p in package}
    wanted |= {f"flexmod/_templates/{p.name}" for p in (ROOT / "templates").iterdir()}
    assert names == wanted, f"missing {wanted - names}, too many {names - wanted}"


def run(*arguments: str, **options: object) -> None:
    subprocess.run([sys.executable, *arguments], check=True, **options)  # type: ignore[call-overload]


if __name__ == "__main__":
    main()
