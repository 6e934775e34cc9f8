import pytest

from tests.support.spark_streams import INSTALL, java, make_home, session


@pytest.fixture(scope="session")
def spark_home(tmp_path_factory):
    if java() is None:
        pytest.skip(f"Spark needs Java 17, which is not found; install it: {INSTALL}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARK_HOME", str(make_home(tmp_path_factory.mktemp("spark"))))
        yield


@pytest.fixture(scope="session")
def spark(spark_home):
    """The Spark of all tests, which also serves Spark Connect."""
    spark = session(
        **{
            "spark.plugins": "org.apache.spark.sql.connect.SparkConnectPlugin",
            "spark.connect.grpc.binding.port": "0",  # any
        }
    )
    yield spark
    spark.stop()
