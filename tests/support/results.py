"""Stamps of results files."""

CPU = {"device": "cpu", "name": "a processor", "attention": "sdpa", "torch": "2.13.0", "threads": 1}


def make_stamp(machine=CPU, **depends_on):
    return {"answers_depend_on": depends_on, "machines": [machine]}
