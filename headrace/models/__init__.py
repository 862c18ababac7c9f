"""Model families, each written as its difference from the common decoder."""
