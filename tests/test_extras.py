"""Packages that are not there: the error names the extra to install."""

import importlib.util
import re

import pytest

from tests.support.processes import python


def needs(package):
    """Skip a case whose module imports this package first, if it is missing as well."""
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed")


@pytest.mark.parametrize(
    ("module", "missing", "extra"),
    [
        ("tailavg.jax", "jax", "jax"),
        ("tailavg.lightning", "lightning", "lightning"),
        pytest.param("tailavg.lightning", "torch", "lightning", marks=needs("lightning")),
        ("tailavg.optax", "jax", "optax"),
        pytest.param("tailavg.optax", "optax", "optax", marks=needs("jax")),
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
    *_, error, note = python("-c", code, code=1).stderr.strip().splitlines()
    assert error == f"ModuleNotFoundError: No module named '{missing}'"
    assert f"pip install 'tailavg[{extra}]'" in note


@pytest.mark.parametrize("name", ["jax", "torch"])
def test_a_package_that_is_blocked_is_reported_in_pythons_own_words(name):
    code = f"import sys; sys.modules[{name!r}] = None; import tailavg.{name}"
    *_, error, note = python("-c", code, code=1).stderr.strip().splitlines()
    assert re.match(rf"ModuleNotFoundError: .*\b{name}\b", error)
    assert f"pip install 'tailavg[{name}]'" in note


def test_tailavg_imports_no_package_of_an_extra():
    code = (
        "import sys, tailavg\n"
        "tailavg.TailAverages(2).scan([1, 2], [1.0, 2.0])\n"
        "print({'numba', 'pandas', 'polars', 'pyarrow', 'torch', 'jax'} & set(sys.modules))"
    )
    assert python("-c", code).stdout == "set()\n"
