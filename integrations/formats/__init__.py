"""Import from and export to the checkpoint formats of other libraries."""
