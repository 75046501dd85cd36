from helpers import few_objects, one_thread  # noqa: F401
