"""The example runs, and a program of the page, on the Spark of the tests."""

import runpy

from tests.support import spark_streams as runs
from tests.support.paths import EXAMPLES
from tests.support.programs import blocks, run

pytestmark = runs.MARKS


def test_spark_stream(spark, tmp_path, capsys):
    example = runpy.run_path(str(EXAMPLES / "spark_stream.py"))
    example["from_files"](spark, tmp_path)
    said = capsys.readouterr().out
    assert "3000 rows; the last of each run:" in said
    for line in said.splitlines()[-3:]:
        run, alone, held, *_, steps, _ = line.split()
        assert alone == held
        assert (run in example["RUNS"], steps) == (True, "1000")
    example["from_rate"](spark, enough=20)
    table = capsys.readouterr().out.split("+------+")[-2]
    assert {line.split("|")[1].strip() for line in table.splitlines() if "|" in line} == set("0123")


def test_standard_deviations_of_the_page(spark):
    page = blocks("spark.md")
    (place,) = [i for i, block in enumerate(page) if "std=True" in block.text]
    program, said = page[place : place + 2]
    assert run(program.text, {}, "spark.md").rstrip("\n") == said.text.rstrip("\n")
