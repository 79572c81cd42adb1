"""Settings of property tests."""

import os


def hypothesis_settings(count: int):
    """Settings of a property test: always the same examples, or as many others as `EXAMPLES` says."""
    from hypothesis import HealthCheck, settings

    more = os.environ.get("EXAMPLES")
    checks = [HealthCheck.function_scoped_fixture]
    return settings(
        max_examples=int(more or count), derandomize=not more, deadline=None, suppress_health_check=checks
    )
