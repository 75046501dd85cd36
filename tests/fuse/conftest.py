"""What all tests of fuse_ share."""

from helpers import few_objects, one_thread  # noqa: F401
