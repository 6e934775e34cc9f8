"""`tail_mean` over Spark Connect: its client is in a process of its own, without Java.

Slow: it is the first of the files to need Spark, which starts here.
"""

from tests.support import spark_streams as runs
from tests.support.paths import ROOT
from tests.support.processes import python

pytestmark = runs.MARKS


def test_streams_and_tables_over_spark_connect(spark, tmp_path):
    service = getattr(spark._jvm, "org.apache.spark.sql.connect.service.SparkConnectService$")
    port = getattr(service, "MODULE$").localPort()
    python("-W", "ignore", "-m", "tests.support.spark_connect", port, tmp_path, cwd=ROOT)
