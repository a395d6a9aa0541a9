"""Appends rows to the file of results."""
import json


def add(path, **row):
    print(row, flush=True)
    with open(path, "a") as file:
        file.write(json.dumps(row) + "\n")


def rows(path, **wanted):
    """The rows that have these values."""
    with open(path) as file:
        return [row for row in map(json.loads, file) if wanted.items() <= row.items()]
