"""What all tests share, in ``tests`` and in ``property_tests``."""

pytest_plugins = ("tests.support.leftovers", "tests.support.time_limits")
