"""A driver of streaming queries, to be killed: python -m tests.support.spark_kills FOLDER…"""

import sys
from pathlib import Path
from typing import Any

from tailavg.spark import tail_mean
from tests.support import spark_streams as runs


def start(spark: Any, folder: Path, files: int) -> Any:
    """Start to average the files of a folder, so many in a batch."""
    lines = runs.stream(spark, folder, files=files)
    averages = tail_mean(lines, "loss", 20, by="run", order_by="step")
    return runs.started(averages, folder, availableNow=True)


def main(folders: list[Path]) -> None:
    scratch = folders[0].with_name("scratch")
    spark = runs.session(
        **{"spark.sql.shuffle.partitions": "1", "spark.local.dir": str(scratch)}  # left when killed
    )
    queries = [start(spark, folder, files=1) for folder in folders]
    while any(query.isActive for query in queries):
        spark.streams.awaitAnyTermination()  # raises as soon as one of them fails
        spark.streams.resetTerminated()


if __name__ == "__main__":
    main(list(map(Path, sys.argv[1:])))
