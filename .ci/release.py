"""Build the sdist, and from it the wheel, and try the wheel in empty environments.

    python .ci/release.py                                         # the core, on this Python
    python .ci/release.py --pythons 3.11 3.13 --extras cli river  # and each extra, on each Python

The core and each extra get an environment of their own with the oldest versions that pyproject.toml
admits, and one with the newest. In each, tests/release/smoke.py runs from another folder.
"""

import argparse
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OLDEST_PYTHON = PROJECT["requires-python"].removeprefix(">=")
LOWEST, HIGHEST = "lowest-direct", "highest"  # as uv calls them


def run(*command, **options):
    """What a command prints; the environment that this script is in is hidden from it."""
    hidden = ("VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    options = {"cwd": ROOT, "env": environment} | options
    ran = subprocess.run(command, capture_output=True, text=True, **options)
    if ran.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{ran.stdout}{ran.stderr}")
    return ran.stdout


def uv(*arguments):
    """Run uv, which takes no Python but those that are installed."""
    return run(sys.executable, "-m", "uv", "--quiet", "--no-python-downloads", *arguments)


def build():
    """The wheel, which is built from the sdist, and has the files of src and no others."""
    for old in DIST.glob("tailavg-*"):
        old.unlink()
    run(sys.executable, "-m", "build", "--outdir", DIST)
    run(sys.executable, "-m", "twine", "check", "--strict", *DIST.glob("tailavg-*"))
    (wheel,) = DIST.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        found = {name for name in opened.namelist() if ".dist-info/" not in name}
    source = ROOT / "src"
    files = (path.relative_to(source) for path in source.rglob("*") if path.is_file())
    wanted = {path.as_posix() for path in files if "__pycache__" not in path.parts}
    if found != wanted:
        sys.exit(f"{wheel.name}: expected the files of src, got a difference: {found ^ wanted}")
    return wheel


def requirements(extras):
    """The packages that the core and these extras ask for, each with its lower bound."""
    extra_ones = [one for extra in extras for one in PROJECT["optional-dependencies"][extra]]
    bounds = {}
    for one in [*PROJECT["dependencies"], *extra_ones]:
        name, more, bound = re.fullmatch(r"([\w-]+)(?:\[(.+)\])?(?:>=(.+))?", one).groups()
        bounds |= requirements(more.split(",")) if bound is None else {name: bound}
    return bounds


def install(wheel, python, extras, resolution, place):
    """Make an environment, and show what is in it of what was asked for."""
    uv("venv", "--python", python, place)
    # a version that has no wheel for this Python is none; Spark's has to be built
    options = ("--only-binary", ":all:", "--no-binary", "pyspark", "--torch-backend", "cpu")
    chosen = [f"--extra={extra}" for extra in extras]
    to = ("pip", "install", "--python", place)
    uv(*to, *options, "--resolution", resolution, "-r", "pyproject.toml", *chosen)
    uv(*to, "--no-deps", wheel)
    uv("pip", "check", "--python", place)

    frozen = re.findall(r"^(\S+?)==(\S+)", uv("pip", "freeze", "--python", place), re.MULTILINE)
    versions = {name.replace("-", "_"): version for name, version in frozen}
    bounds = requirements(extras)
    versions = {name: versions[name.replace("-", "_")] for name in bounds}
    shown = ", ".join(f"{name} {version}" for name, version in versions.items())
    oldest = (place / "lib" / f"python{OLDEST_PYTHON}").exists()
    print(f"{python} {','.join(extras) or 'core'}, {resolution}: {shown}", flush=True)
    # a later Python may have no wheel of the oldest version, and an extra may ask for a newer NumPy
    for name in bounds if not extras else bounds.keys() - requirements([]).keys():
        bound = bounds[name]
        if resolution == LOWEST and oldest and not f"{versions[name]}.".startswith(f"{bound}."):
            sys.exit(f"{name}>={bound}: expected to get it, got {versions[name]}; raise the bound")


def smoke(extras, place, folder):
    """Run the smoke test, in a folder and with an environment that know nothing of ours."""
    kept = {name: os.environ[name] for name in ("PATH", "JAVA_HOME") if name in os.environ}
    environment = kept | {"HOME": folder, "JAX_PLATFORMS": "cpu"}
    script = ROOT / "tests" / "release" / "smoke.py"
    printed = run(place / "bin" / "python", script, "core", *extras, cwd=folder, env=environment)
    (wanted,) = place.glob("lib/python*/site-packages/tailavg/__init__.py")
    if printed.splitlines()[-1] != str(wanted):
        sys.exit(f"smoke.py: expected to import {wanted}, got {printed}")


def main():
    """Build once, and try every combination."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pythons", nargs="+", default=[sys.executable], help="versions, or paths")
    parser.add_argument("--extras", nargs="*", default=[], help="one, or several as in cli,plot")
    arguments = parser.parse_args()
    wheel = build()
    for python in arguments.pythons:
        for extras in ([], *(extra.split(",") for extra in arguments.extras)):
            for resolution in (LOWEST, HIGHEST):
                with TemporaryDirectory() as folder:
                    place = Path(folder, "venv")
                    install(wheel, python, extras, resolution, place)
                    smoke(extras, place, folder)


if __name__ == "__main__":
    main()
