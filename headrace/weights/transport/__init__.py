"""Ways by which new weights reach a rank: files, and broadcasts in a group."""
