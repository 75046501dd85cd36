"""The helpers that the rest of the package is built on; users call none of them."""
