"""What a skipped row gets: one file for each projector."""
