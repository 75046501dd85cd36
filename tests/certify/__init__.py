"""What the package is put through: `make certify`, part by part, each with a record."""
