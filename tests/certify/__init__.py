"""The parts of `make certify`, each with a record."""
