"""Packages that are not there: the error names the extra to install."""

import re
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "missing", "extra"),
    [
        ("tailavg.jax", "jax", "jax"),
        ("tailavg.lightning", "lightning", "lightning"),
        ("tailavg.lightning", "torch", "lightning"),
        ("tailavg.optax", "jax", "optax"),
        ("tailavg.optax", "optax", "optax"),
        ("tailavg.river", "river", "river"),
        ("tailavg.pandas", "pandas", "pandas"),
        ("tailavg.polars", "polars", "polars"),
        ("tailavg.torch", "torch", "torch"),
    ],
)
def test_a_missing_package_names_the_extra_to_install(module, missing, extra):
    """A finder that finds nothing, as if the package had never been installed."""
    code = (
        "import sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.split('.')[0] == {missing!r}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "import tailavg\n"
        f"import {module}\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    *_, error, note = ran.stderr.strip().splitlines()
    assert error == f"ModuleNotFoundError: No module named '{missing}'"
    assert f"pip install 'tailavg[{extra}]'" in note


@pytest.mark.parametrize("name", ["jax", "torch"])
def test_a_package_that_is_blocked_is_reported_in_pythons_own_words(name):
    code = f"import sys; sys.modules[{name!r}] = None; import tailavg.{name}"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    *_, error, note = ran.stderr.strip().splitlines()
    assert re.match(rf"ModuleNotFoundError: .*\b{name}\b", error)
    assert f"pip install 'tailavg[{name}]'" in note


def test_tailavg_imports_no_package_of_an_extra():
    code = (
        "import sys, tailavg\n"
        "tailavg.TailAverages(2).scan([1, 2], [1.0, 2.0])\n"
        "print({'numba', 'pandas', 'polars', 'pyarrow', 'torch', 'jax'} & set(sys.modules))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "set()\n"
