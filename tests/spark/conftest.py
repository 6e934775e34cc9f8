import pytest

from tests.support.spark_streams import INSTALL, java, session


@pytest.fixture(scope="session")
def spark_is_there():
    if java() is None:
        pytest.skip(f"Spark needs Java 17, which is not found; install it: {INSTALL}")


@pytest.fixture(scope="session")
def spark(spark_is_there):
    spark = session()
    yield spark
    spark.stop()
