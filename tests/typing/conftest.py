collect_ignore = ["client.py"]  # for mypy and pyright, which `make lint` runs
