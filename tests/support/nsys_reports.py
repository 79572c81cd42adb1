"""Reports of nsys as its sqlite export has them, made by hand."""

import sqlite3
from contextlib import closing

PUSH_POP, MARK, DOMAIN_CREATE = 59, 34, 75
TABLES = {
    "StringIds": "id, value",
    "NVTX_EVENTS": "start, end, eventType, text, textId, domainId, globalTid",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start, end, globalTid, correlationId, nameId",
    "CUPTI_ACTIVITY_KIND_KERNEL": "start, end, globalPid, correlationId, shortName",
}


def write_nsys_sqlite(path, strings=(), events=(), calls=(), kernels=()):
    """strings: by their ids; the rest are rows of `TABLES`."""
    path.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as database:
        rows = (enumerate(strings), events, calls, kernels)
        for (table, columns), found in zip(TABLES.items(), rows, strict=True):
            database.execute(f"CREATE TABLE {table} ({columns})")
            marks = ", ".join("?" * len(columns.split(", ")))
            database.executemany(f"INSERT INTO {table} VALUES ({marks})", found)
        database.commit()
    return path
