"""Number formats, as transformations of plain modules."""
