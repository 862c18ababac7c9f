"""The book: which sequence runs when. Neither torch nor I/O."""
