"""Model families, each as its difference from the common decoder."""
