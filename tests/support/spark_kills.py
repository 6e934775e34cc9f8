"""Streaming queries in a process of its own, to be killed: python spark_kills.py FILES FOLDER…"""

import sys
from pathlib import Path

from tailavg.spark import tail_mean
from tests.support import spark_streams as runs


def main(files: int, folders: list[Path]) -> None:
    spark = runs.session(**{"spark.sql.shuffle.partitions": "1", "spark.log.level": "OFF"})
    queries = []
    for folder in folders:
        lines = spark.readStream.schema(runs.SCHEMA).option("maxFilesPerTrigger", files)
        df = tail_mean(lines.parquet(str(folder / "in")), "loss", 20, by="run", order_by="step")
        queries.append(runs.started(df, folder, availableNow=True))
    for query in queries:
        query.awaitTermination()


if __name__ == "__main__":
    main(int(sys.argv[1]), list(map(Path, sys.argv[2:])))
