"""The place of a class in files of an earlier version."""

from .swap import FusedConv1D  # noqa: F401
