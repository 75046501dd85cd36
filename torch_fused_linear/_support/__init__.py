"""What the rest of the package is built on; nothing here is called by users."""
