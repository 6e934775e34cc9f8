import pytest

from spark_runs import INSTALL, java, session

SLOW = ("test_stream.py", "test_table.py", "test_kills.py", "test_connect.py", "test_example.py")


def pytest_collection_modifyitems(items):
    """What needs a real Spark is slow, and runs in one process, with one Spark."""
    for item in items:
        if item.path.parent.name == "spark" and item.path.name in SLOW:
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.xdist_group("spark"))
            item.add_marker(pytest.mark.filterwarnings("ignore:PySpark does not yet fully support"))


@pytest.fixture(scope="session")
def spark_is_there():
    if java() is None:
        pytest.skip(f"Spark needs Java 17, which is not found; install it: {INSTALL}")


@pytest.fixture(scope="session")
def spark(spark_is_there):
    spark = session()
    yield spark
    spark.stop()
